//! What `serve`, `chat` and `bench serve` share: opening a model behind an engine.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use ferrospeed_comm::Group;
use ferrospeed_serve::core::schedule::Limits;
use ferrospeed_serve::draft::Draft;
use ferrospeed_serve::engine::Engine;
use ferrospeed_serve::model::{self, Division, ModelFacts, OpenOptions, open};
use ferrospeed_serve::runner::Runner;
use ferrospeed_serve::speculate::Speculation;
use ferrospeed_serve::together;
use ferrospeed_serve::weights_home::WeightsHome;
use ferrospeed_tensor::{Device, PackedBits};

use crate::hub::{base_at, model_at};
use crate::writable::unusable;
use crate::{DeviceChoice, Failure, NamedModel};

/// The model, where it computes, and what bounds the work.
#[derive(Debug, Args)]
pub struct ServedModel {
    #[command(flatten)]
    model: NamedModel,
    /// The model that an adapter is of [default: the directory that the adapter names]
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// The type to compute in [default: the model's own]
    #[arg(long, value_parser = ["float32", "bfloat16", "float16"])]
    dtype: Option<String>,
    /// Hold the weights of linear layers in fewer bits; fp8 needs a GPU that multiplies such [default: as the files do]
    #[arg(long, value_name = "BITS", value_parser = ["int8", "int4", "fp8"])]
    quantize: Option<String>,
    /// Where weights wait until a pass needs them: `host` (a GPU's), or a directory on a fast disk, for models that are larger than
    /// memory [default: where they are used]
    #[arg(long, value_name = "PLACE")]
    weights_in: Option<PathBuf>,
    /// Guess tokens ahead, so that a pass may settle several: `lookup` takes what followed earlier in the text, `draft` asks
    /// --draft-model. Answers stay the same
    #[arg(long, value_name = "HOW", value_parser = ["lookup", "draft"], requires_if("draft", "draft_model"))]
    speculate: Option<String>,
    /// A smaller model with the same tokenizer, which guesses
    #[arg(long, value_name = "DIR", requires = "speculate")]
    draft_model: Option<PathBuf>,
    /// Tokens that are guessed for a pass, at most
    #[arg(long, value_name = "TOKENS", default_value_t = 4, value_parser = clap::value_parser!(u8).range(1..=64), requires = "speculate")]
    speculate_tokens: u8,
    /// Where to compute: auto, cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "FERROSPEED_DEVICE", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
    /// Memory for keys and values, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 1024, value_parser = clap::value_parser!(u64).range(1..))]
    cache_mib: u64,
    /// Tokens that one pass through the model computes, at most
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one)]
    pass_tokens: usize,
    /// Sequences that are worked on at once
    #[arg(long, value_name = "COUNT", default_value_t = 64, value_parser = at_least_one)]
    max_running: usize,
    /// Sequences that may wait; more are sent away
    #[arg(long, value_name = "COUNT", default_value_t = 256, value_parser = at_least_one)]
    max_waiting: usize,
    /// Tokens of a text, prompt and answer together [default: what the model and the cache allow]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one)]
    max_length: Option<usize>,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    let found = text.parse().ok().filter(|&count| count >= 1);
    found.ok_or_else(|| "must be a whole number of 1 or more".to_owned())
}

impl ServedModel {
    /// Where a server is meant, its address.
    pub fn url(&self) -> Option<&str> {
        self.model.given().to_str().filter(|text| text.starts_with("http://") || text.starts_with("https://"))
    }

    /// Which option was given that only an engine of our own could follow.
    pub fn engine_option(&self) -> Option<&'static str> {
        let given = [
            (self.dtype.is_some(), "--dtype"),
            (self.quantize.is_some(), "--quantize"),
            (self.speculate.is_some(), "--speculate"),
            (self.base.is_some(), "--base"),
            (self.weights_in.is_some(), "--weights-in"),
            (self.max_length.is_some(), "--max-length"),
        ];
        given.into_iter().find(|(given, _)| *given).map(|(_, name)| name)
    }

    /// What to say where texts cannot be as long as was asked for.
    pub fn shortened(&self, engine: &Engine) -> Option<String> {
        let (asked, most) = (self.max_length?, engine.limits().sequence_tokens);
        (asked > most).then(|| {
            format!("texts have up to {most} tokens, not {asked}: model and cache allow no more (--cache-mib makes room in the cache)")
        })
    }

    /// Opens it; clients will call it `name`.
    pub fn start(&self, name: Option<&str>) -> Result<Engine, Failure> {
        self.start_in(name, None)
    }

    /// Refuses a model that so many ranks could not hold, before any of them starts.
    pub fn check(&self, division: Division, ranks: usize) -> Result<(), Failure> {
        let place = self.model.place()?;
        let base = base_at(&place, self.base.as_deref())?;
        model::check(&place, base.as_deref(), division, ranks)
            .map_err(|error| Failure::Usage(error.to_string()))
    }

    /// Computes what the first rank of a group, which serves the same model, tells this one, until it ends.
    pub fn follow(&self, group: &Group, division: Division) -> Result<(), Failure> {
        let options = self.options(None, Some((group.clone(), division)))?;
        let (_, runner, _) = self.open(&options, &self.device.open()?)?;
        together::follow(group, runner).map_err(|error| Failure::Run(error.to_string()))
    }

    fn options(&self, name: Option<&str>, ranks: Option<(Group, Division)>) -> Result<OpenOptions, Failure> {
        let place = self.model.place()?;
        Ok(OpenOptions {
            dtype: self.dtype.clone(),
            packed: self.quantize.as_deref().and_then(PackedBits::by_name),
            cache_bytes: self.cache_mib.saturating_mul(1 << 20),
            running: self.max_running,
            name: name.map(str::to_owned).or_else(|| self.model.name()),
            ranks,
            weights: None,
            base: base_at(&place, self.base.as_deref())?,
            home: match &self.weights_in {
                None => WeightsHome::Device,
                Some(place) if place.as_os_str() == "host" => WeightsHome::host(),
                Some(directory) => WeightsHome::disk(directory),
            },
        })
    }

    fn open(
        &self,
        options: &OpenOptions,
        device: &Device,
    ) -> Result<(Arc<ModelFacts>, Runner, u32), Failure> {
        if let Some(place) = self.weights_in.as_ref().filter(|place| place.as_os_str() != "host") {
            // A slip of the pen must not become a folder.
            let why = match place.is_dir() {
                true => unusable(place),
                false => Some(format!("{} is neither `host` nor a directory that is there", place.display())),
            };
            why.map_or(Ok(()), |why| Err(Failure::Usage(format!("--weights-in: {why}"))))?;
        }
        open(&self.model.place()?, options, device).map_err(|error| Failure::Usage(error.to_string()))
    }

    /// Opens it; the ranks of the group hold it together, and this one is the first.
    pub fn start_in(&self, name: Option<&str>, ranks: Option<(Group, Division)>) -> Result<Engine, Failure> {
        let device = self.device.open()?;
        let options = self.options(name, ranks)?;
        let (facts, runner, blocks) = self.open(&options, &device)?;
        let limits = Limits {
            pass_tokens: self.pass_tokens,
            running: self.max_running,
            waiting: self.max_waiting,
            sequence_tokens: self.max_length.unwrap_or(usize::MAX),
        };
        let tokens = usize::from(self.speculate_tokens);
        let started = match (self.speculate.as_deref(), &self.draft_model) {
            (Some("draft"), Some(path)) => {
                let draft = Draft::open(
                    &model_at(path)?,
                    &OpenOptions {
                        packed: None,
                        name: None,
                        ranks: None,
                        base: None,
                        home: WeightsHome::Device,
                        ..options
                    },
                    &device,
                    &facts,
                    tokens,
                )
                .map_err(|error| Failure::Usage(error.to_string()))?;
                Engine::start_drafting(facts, runner, blocks, limits, draft)
            }
            (_, Some(_)) => {
                return Err(Failure::Usage("--draft-model guesses with --speculate draft alone".into()));
            }
            (None, None) => Engine::start(facts, runner, blocks, limits),
            (Some(_), None) => {
                Engine::start_guessing(facts, runner, blocks, limits, Speculation::LookUp { tokens })
            }
        };
        started.map_err(|error| Failure::Run(format!("cannot start the engine's thread: {error}")))
    }
}
