//! What `init_inference` gives: a model that generates by its configuration, and tells how long passes take.

use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ferrospeed_comm::{Group, World};
use ferrospeed_models::{ModelConfig, WindowRule};
use ferrospeed_tensor::{Device, PackedBits};
use serde_json::{Map, Value};

use super::checkpoint;
use super::config::{InferenceConfig, InferenceDtype};
use super::merge::merged;
use super::{InferenceError, Result};
use crate::ServeError;
use crate::core::pool::BLOCK_TOKENS;
use crate::core::schedule::Limits;
use crate::engine::Engine;
use crate::model::{Division, ModelFacts, OpenOptions, open};
use crate::request::{Event, Request, Special, Work};
use crate::sampling::SamplingOptions;
use crate::together;
use crate::weights_home::WeightsHome;

/// Sequences that a call of [`InferenceEngine::generate`] works on at once.
const RUNNING: usize = 64;
/// Tokens of a pass.
const PASS_TOKENS: usize = 512;
/// Time for a call.
const CALL_TIME: Duration = Duration::from_secs(24 * 3600);

/// Settings that change nothing here, and why.
const WITHOUT_EFFECT: [(&str, &str); 10] = [
    ("replace_with_kernel_inject", "the engine's own kernels are always used"),
    ("enable_cuda_graph", "a GPU records passes wherever it can"),
    ("use_triton", "there is no Triton here"),
    ("triton_autotune", "there is no Triton here"),
    ("triangular_masking", "a decoder's tokens never see what follows"),
    ("quant", "weights keep the type that dtype names"),
    ("set_empty_params", "weights are read once, into their place"),
    ("return_tuple", "there are no Python modules to return to"),
    ("training_mp_size", "checkpoints are whole"),
    ("transposed_mode", "weights are read in the layout of their family"),
];

/// A model behind an engine.
#[derive(Debug)]
pub struct InferenceEngine {
    seat: Seat,
    /// All ranks, where they hold the model together: through it they get the texts.
    ranks: Option<Group>,
    config: InferenceConfig,
    warnings: Vec<String>,
}

/// What this rank does.
#[derive(Debug)]
enum Seat {
    /// It takes the prompts.
    First(Engine),
    /// It computes its part of what the first one tells, on a thread of its own.
    Other(Option<JoinHandle<crate::error::Result<()>>>),
}

impl Drop for Seat {
    fn drop(&mut self) {
        if let Seat::Other(following) = self
            && let Some(following) = following.take()
        {
            // The first rank's engine lets it go; what went wrong was told by a call.
            let _ = following.join();
        }
    }
}

/// How a call generates.
#[derive(Debug, Clone, Default)]
pub struct GenerateCall {
    /// New tokens, at most.
    pub max_new_tokens: usize,
    /// Beams; more than one are refused.
    pub num_beams: Option<usize>,
    /// How tokens are chosen.
    pub sampling: SamplingOptions,
    /// Tokens that end a sequence; they are part of the result.
    pub end_tokens: Vec<i64>,
}

/// Opens the model in a Hugging Face directory by DeepSpeed's inference configuration: `config` is nothing, the path of a JSON
/// file or an object, `arguments` are settings beside it.
pub fn init_inference(
    directory: &Path,
    config: &Value,
    arguments: &Map<String, Value>,
    device: &Device,
) -> Result<InferenceEngine> {
    init_inference_on(&World::solo(), directory, config, arguments, device)
}

/// The same on the ranks of a job: `tensor_parallel.tp_size` of them, each of which holds slices of the model, or `moe.ep_size`,
/// each of which holds some of its experts. Each calls this and then every method, and each gets the texts; the prompts are the
/// first one's.
pub fn init_inference_on(
    world: &World,
    directory: &Path,
    config: &Value,
    arguments: &Map<String, Value>,
    device: &Device,
) -> Result<InferenceEngine> {
    let config = InferenceConfig::new(&merged(config, arguments)?)?;
    let (dtype, packed) = refuse_what_is_not_built(&config)?;
    let division = division(&config, world.size())?;
    let ranks = match division {
        Some(division) => Some((every_rank(world, "passes")?, division)),
        None => None,
    };
    check_policy(&config, directory)?;
    let options = OpenOptions {
        dtype: Some(dtype.to_owned()),
        packed,
        cache_bytes: u64::MAX,
        running: 1,
        name: None,
        ranks: ranks.clone(),
        weights: match config.checkpoint() {
            Value::Null => None,
            described => Some(checkpoint::files(&described, config.base_dir())?),
        },
        home: WeightsHome::of_section(&config.values()["zero"]),
        base: None,
    };
    if let (Some(target), 0) = (config.save_path(), world.rank()) {
        checkpoint::save(directory, Path::new(target), dtype, world.size())?;
    }
    // Room for as many sequences of the longest length as run at once, which is what DeepSpeed's workspace holds.
    let most = config.max_out_tokens();
    let options = OpenOptions { running: sequences_worth(most, directory)?, ..options };
    let (facts, runner, blocks) = open(directory, &options, device)?;
    check_room(&config, &facts, blocks)?;
    let limits =
        Limits { pass_tokens: PASS_TOKENS, running: RUNNING, waiting: 1 << 16, sequence_tokens: most };
    let failed = |error| ServeError::Io { what: "cannot start the engine's thread".into(), error };
    let seat = match ranks.map(|(group, _)| group).filter(|group| group.rank() > 0) {
        None => Seat::First(Engine::start(facts, runner, blocks, limits).map_err(failed)?),
        Some(group) => {
            let following = std::thread::Builder::new().name("passes".into());
            let following = following.spawn(move || together::follow(&group, runner)).map_err(failed)?;
            Seat::Other(Some(following))
        }
    };
    let ranks = (world.size() > 1).then(|| every_rank(world, "answers")).transpose()?;
    let mut warnings = config.warnings().to_vec();
    for (key, why) in WITHOUT_EFFECT {
        if config.given().contains(&key) {
            warnings.push(format!("{key} has no effect: {why}"));
        }
    }
    warnings.extend(config.mixture_warnings());
    if config.given().contains(&"zero") && !options.home.is_away(device) {
        let why = "weights are where they are used; stage 3 with offload_param to the host of a GPU, or to nvme, keeps them elsewhere";
        warnings.push(format!("zero has no effect: {why}"));
    }
    Ok(InferenceEngine { seat, ranks, config, warnings })
}

/// How the ranks of the job hold the model; `None` where there is one.
fn division(config: &InferenceConfig, ranks: usize) -> Result<Option<Division>> {
    let (slices, experts) = (config.tensor_parallel_size()?, config.expert_parallel_size()?);
    let division = Division::of(slices, experts)?;
    let needed = division.map_or(1, |(_, needed)| needed);
    if needed == ranks {
        return Ok(division.map(|(division, _)| division));
    }
    let what = if slices > 1 || experts == 1 { "tensor_parallel.tp_size" } else { "moe.ep_size" };
    let why = format!("it is {needed} and the job has {ranks} ranks: start as many ranks as it says");
    Err(InferenceError::NotBuilt { what: what.into(), why })
}

/// A group of all ranks for one purpose.
fn every_rank(world: &World, name: &str) -> Result<Group> {
    let all: Vec<usize> = (0..world.size()).collect();
    let group =
        world.named_group(&all, Some(name)).map_err(|error| InferenceError::Failed(error.to_string()))?;
    group.ok_or_else(|| InferenceError::Failed("this rank is not in its own job".into()))
}

/// How many of the model's longest texts take as much cache as [`RUNNING`] of `most` tokens.
fn sequences_worth(most: usize, directory: &Path) -> Result<usize> {
    let ModelConfig::Decoder(config) =
        ModelConfig::from_directory(directory, WindowRule::default()).map_err(ServeError::from)?
    else {
        return Err(ServeError::NoDecoder(directory.to_path_buf()).into());
    };
    Ok((RUNNING * most).div_ceil(config.longest_paged().max(1)).max(1))
}

/// Refuses to begin where the least number of tokens that is expected finds no room.
fn check_room(config: &InferenceConfig, facts: &ModelFacts, blocks: u32) -> Result<()> {
    let (least, held) = (config.min_out_tokens(), (blocks as usize).saturating_mul(BLOCK_TOKENS));
    let why = match () {
        () if least > facts.longest => {
            format!("the model reads texts of {} tokens, prompt and answer together", facts.longest)
        }
        () if least > held => format!("there is memory for the keys and values of {held} tokens"),
        () => return Ok(()),
    };
    Err(InferenceError::Setting {
        path: vec!["min_out_tokens".into()],
        why: format!("{least} tokens are expected, and {why}"),
    })
}

/// The type to compute in, and how many bits weights have where they have few.
fn refuse_what_is_not_built(config: &InferenceConfig) -> Result<(&'static str, Option<PackedBits>)> {
    let refuse = |what: &str, why: &str| Err(InferenceError::NotBuilt { what: what.into(), why: why.into() });
    let values = config.values();
    for (key, why) in [("config", "the model's own config.json counts; change it there")] {
        if !values[key].is_null() {
            return refuse(key, why);
        }
    }
    if !config.checkpoint().is_null() && config.save_path().is_some() {
        return refuse(
            "save_mp_checkpoint_path",
            "with checkpoint there is nothing to write: its files are read as they are",
        );
    }
    match config.dtype() {
        InferenceDtype::Fp16 => Ok(("float16", None)),
        InferenceDtype::Fp32 => Ok(("float32", None)),
        InferenceDtype::Bf16 => Ok(("bfloat16", None)),
        // As DeepSpeed's: weights of 8 bits, activations of 16.
        InferenceDtype::Int8 => Ok(("float16", Some(PackedBits::Eight))),
    }
}

/// A policy of the user's names layers that are there; on one device it changes nothing.
fn check_policy(config: &InferenceConfig, directory: &Path) -> Result<()> {
    let values = config.values();
    let Some(policy) = values["injection_policy"].as_object().filter(|policy| !policy.is_empty()) else {
        return Ok(());
    };
    if values["replace_with_kernel_inject"] == true {
        return Err(InferenceError::TwoInjections);
    }
    let model = ModelConfig::from_directory(directory, WindowRule::default()).map_err(ServeError::from)?;
    let parameters = model.parameters();
    let modules: Vec<&str> = parameters
        .as_slice()
        .iter()
        .filter_map(|param| param.name().rsplit_once('.').map(|(module, _)| module))
        .collect();
    let layers = policy.values().flat_map(|value| match value {
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().into_iter().collect::<Vec<_>>(),
    });
    for layer in layers {
        if !modules.iter().any(|module| module.ends_with(layer)) {
            return Err(InferenceError::NoLayer(layer.to_owned()));
        }
    }
    Ok(())
}

impl InferenceEngine {
    /// Its configuration.
    pub fn config(&self) -> &InferenceConfig {
        &self.config
    }

    /// What a user should know: deprecated settings, and those that have no effect.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Goes on with every prompt; gives prompts and continuations together.
    pub fn generate(&self, prompts: &[Vec<i64>], call: &GenerateCall) -> Result<Vec<Vec<i64>>> {
        let texts = match &self.seat {
            Seat::First(engine) => Some(self.generate_here(engine, prompts, call)),
            Seat::Other(_) => None,
        };
        match &self.ranks {
            Some(ranks) => shared(ranks, texts),
            None => texts.unwrap_or_else(|| Ok(prompts.to_vec())),
        }
    }

    fn generate_here(
        &self,
        engine: &Engine,
        prompts: &[Vec<i64>],
        call: &GenerateCall,
    ) -> Result<Vec<Vec<i64>>> {
        if call.num_beams.is_some_and(|beams| beams > 1) {
            let why = "one sequence is followed at a time".to_owned();
            return Err(InferenceError::NotBuilt { what: "`num_beams` > 1".into(), why });
        }
        let most = self.config.max_out_tokens().min(engine.limits().sequence_tokens);
        let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
        if longest + call.max_new_tokens > most {
            return Err(InferenceError::TooLong { tokens: longest + call.max_new_tokens, most });
        }
        let ask = |prompt: &Vec<i64>| {
            let answers = vec![SamplingOptions { logprobs: Some(0), ..call.sampling.clone() }];
            let max_tokens = Some(call.max_new_tokens);
            let work = Work::Generate {
                answers,
                max_tokens,
                stops: Vec::new(),
                stop_tokens: Vec::new(),
                special: Special::Hidden,
            };
            let deadline = Instant::now() + CALL_TIME;
            engine.ask(Request { prompt: prompt.clone(), work, first_answer: 0, deadline })
        };
        if call.max_new_tokens == 0 {
            return Ok(prompts.to_vec());
        }
        let replies: Vec<_> = prompts.iter().map(ask).collect();
        let mut texts = prompts.to_vec();
        for (text, replies) in texts.iter_mut().zip(replies) {
            for event in replies {
                match event {
                    Event::Token { logprobs: Some((own, _)), .. } => {
                        text.push(own.token);
                        // Dropping the replies takes the request back.
                        if call.end_tokens.contains(&own.token) {
                            break;
                        }
                    }
                    Event::Trouble(trouble) => return Err(InferenceError::Failed(format!("{trouble:?}"))),
                    _ => {}
                }
            }
        }
        Ok(texts)
    }

    /// From now on the time of every pass is kept, by the first rank.
    pub fn profile_model_time(&self) {
        if let Seat::First(engine) = &self.seat {
            engine.metrics().keep_pass_times();
        }
    }

    /// The times of passes since they were last asked for, in milliseconds; the first rank knows them.
    pub fn model_times(&self) -> Result<Vec<f64>> {
        match &self.seat {
            Seat::First(engine) => engine.metrics().take_pass_times().ok_or(InferenceError::NotProfiling),
            Seat::Other(_) => Ok(Vec::new()),
        }
    }
}

/// What the first rank has, texts or what went wrong, on all.
fn shared(ranks: &Group, texts: Option<Result<Vec<Vec<i64>>>>) -> Result<Vec<Vec<i64>>> {
    let failed = |error: ferrospeed_comm::Error| InferenceError::Failed(error.to_string());
    // Texts as their lengths and tokens; a failure as its letters behind a length that no text has.
    let mut words = match &texts {
        Some(Ok(texts)) => {
            let mut words = Vec::new();
            for text in texts {
                words.push(text.len() as i64);
                words.extend_from_slice(text);
            }
            words
        }
        Some(Err(error)) => {
            let letters = error.to_string();
            std::iter::once(-1).chain(letters.bytes().map(i64::from)).collect()
        }
        None => Vec::new(),
    };
    let mut length = [words.len() as i64];
    ranks.broadcast(&mut length, 0).map_err(failed)?;
    words.resize(usize::try_from(length[0]).unwrap_or(0), 0);
    ranks.broadcast(&mut words, 0).map_err(failed)?;
    if let Some(texts) = texts {
        return texts;
    }
    if let Some((-1, letters)) = words.split_first() {
        let letters: Vec<u8> = letters.iter().filter_map(|&letter| u8::try_from(letter).ok()).collect();
        return Err(InferenceError::Failed(format!("rank 0: {}", String::from_utf8_lossy(&letters))));
    }
    let (mut texts, mut rest) = (Vec::new(), words.as_slice());
    while let Some((&length, tokens)) = rest.split_first() {
        let text = usize::try_from(length).ok().and_then(|length| tokens.split_at_checked(length));
        let (text, later) =
            text.ok_or_else(|| InferenceError::Failed("the first rank sent what are no texts".into()))?;
        texts.push(text.to_vec());
        rest = later;
    }
    Ok(texts)
}
