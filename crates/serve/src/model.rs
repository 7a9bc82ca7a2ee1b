//! A model that is ready to serve: weights in memory, tokenizer, chat template, cache.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_models::decoder::{Spread, dtype_of_name};
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles, TextFiles};
use ferrospeed_nn::Parameters;
use ferrospeed_nn::moe::{ExpertRanks, RankTokens};
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_tensor::store::{PackedStore, PlainStore};
use ferrospeed_tensor::{DType, Device, PackedBits, Param};
use ferrospeed_text::Codec;
use ferrospeed_zero::ZeroStore;

use crate::core::pool::BLOCK_TOKENS;
use crate::error::{Result, ServeError};
use crate::runner::Runner;
use crate::weights_home::{WeightsHome, attach_away};
use ferrospeed_text::ChatTemplate;

/// What is known of a model besides its weights: shared by everyone who talks to clients.
#[derive(Debug)]
pub struct ModelFacts {
    /// What clients call it.
    pub name: String,
    /// Text to tokens and back.
    pub codec: Codec,
    /// How messages become a prompt.
    pub template: ChatTemplate,
    /// Tokens that end an answer.
    pub end_tokens: Vec<i64>,
    /// Tokens that it knows.
    pub vocabulary: usize,
    /// Tokens that a text may have, prompt and answer together.
    pub longest: usize,
    /// Bytes that are kept of a text that runs, beside the cache.
    pub text_bytes: usize,
}

impl ModelFacts {
    /// Tokens that the tokenizer has made of a text, or why the model cannot read them.
    pub fn readable(&self, ids: Vec<u32>) -> Result<Vec<i64>, String> {
        match ids.iter().max() {
            Some(&token) if token as usize >= self.vocabulary => Err(format!(
                "the tokenizer makes the token {token} of it, and the model knows {} tokens: the tokenizer is another model's, or was given tokens that the model was not",
                self.vocabulary
            )),
            _ => Ok(ids.into_iter().map(i64::from).collect()),
        }
    }

    /// What is to be said before anybody asks: tokens of its files that the model does not know.
    pub fn notes(&self) -> Vec<String> {
        let (tokenizer, model) = (self.codec.vocabulary(), self.vocabulary as u64);
        let unread = (tokenizer > model).then(|| {
            format!("the tokenizer has {tokenizer} tokens and the model {model}: text that needs one of the others is refused")
        });
        let unknown = self.end_tokens.iter().filter(|&&token| token < 0 || token as u64 >= model);
        let unended = unknown.map(|token| {
            format!(
                "eos_token_id names the token {token}, and the model has {model}: no answer will end with it"
            )
        });
        let kept = (self.text_bytes > 0).then(|| {
            let mib = self.text_bytes.div_ceil(1 << 20);
            format!("each text that runs takes {mib} MiB beside the cache (--max-running bounds them)")
        });
        unread.into_iter().chain(unended).chain(kept).collect()
    }
}

/// How the ranks of a group hold one model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Division {
    /// Each has slices of all layers.
    Slices,
    /// Each has some of a mixture's experts, and all of the rest.
    Experts,
    /// Each has some of a mixture's experts, and slices of the rest.
    SlicesAndExperts,
}

impl Division {
    /// That of `--tp` and `--ep`, `tensor_parallel.tp_size` and `moe.ep_size`, with the number of ranks that they need. `None`
    /// for one rank. Sizes that differ are refused: slices of experts on fewer ranks than there are slices are not built.
    pub fn of(slices: usize, experts: usize) -> Result<Option<(Division, usize)>> {
        match (slices, experts) {
            (1, 1) => Ok(None),
            (slices, 1) => Ok(Some((Division::Slices, slices))),
            (1, experts) => Ok(Some((Division::Experts, experts))),
            (slices, experts) if slices == experts => Ok(Some((Division::SlicesAndExperts, slices))),
            (slices, experts) => Err(ServeError::Division { slices, experts }),
        }
    }

    /// What the ranks of a group hold by it.
    fn spread(self, group: &Group) -> Spread {
        let has_slices = self != Division::Experts;
        let experts = ExpertRanks { group: group.clone(), tokens: RankTokens::Same };
        Spread {
            slices: has_slices.then(|| group.into()),
            experts: (self != Division::Slices).then_some(experts),
        }
    }
}

/// How to open a model.
#[derive(Debug, Clone)]
pub struct OpenOptions {
    /// The type to compute in, by its Hugging Face name; the files' own when absent.
    pub dtype: Option<String>,
    /// Weights of linear layers in so many bits, where the files do not hold them so already.
    pub packed: Option<PackedBits>,
    /// Memory for keys and values.
    pub cache_bytes: u64,
    /// Sequences that will run at once: the cache is not made larger than they could fill.
    pub running: usize,
    /// What clients call it; the directory's name when absent.
    pub name: Option<String>,
    /// The ranks that hold the model together, all of which open it, and how; the first one serves.
    pub ranks: Option<(Group, Division)>,
    /// The files with its weights, where those are not in the directory.
    pub weights: Option<Vec<PathBuf>>,
    /// Where the weights wait until a pass needs them.
    pub home: WeightsHome,
    /// The directory of the model that an adapter is of, where it is not the one that the adapter names.
    pub base: Option<PathBuf>,
}

impl Default for OpenOptions {
    /// As the files say, on the device, with a cache of a GiB.
    fn default() -> OpenOptions {
        OpenOptions {
            dtype: None,
            packed: None,
            cache_bytes: 1 << 30,
            running: 64,
            name: None,
            ranks: None,
            weights: None,
            home: WeightsHome::Device,
            base: None,
        }
    }
}

/// Text to tokens and back, as a model's files say.
pub fn codec_of(files: &ModelFiles, vocabulary: usize) -> Result<Codec> {
    Ok(match files.text() {
        TextFiles::In(directory) => Codec::of_model(directory, vocabulary as u64)?,
        TextFiles::Held { tokenizer, config } => {
            Codec::from_bytes(files.path(), tokenizer.to_string().as_bytes(), config)?
        }
    })
}

/// Refuses what [`open`] would refuse on each of so many ranks, without reading a weight.
pub fn check(path: &Path, base: Option<&Path>, division: Division, ranks: usize) -> Result<()> {
    let files = ModelFiles::open_on(path, base)?;
    let ModelConfig::Decoder(config) = files.model()? else {
        return Err(ServeError::NoDecoder(path.to_path_buf()));
    };
    codec_of(&files, config.vocab)?;
    if division != Division::Experts {
        config.check_slices(ranks, Between::AllTokens)?;
    }
    if division != Division::Slices {
        config.check_experts(ranks)?;
    }
    Ok(files.weights().check(Decoder::new(*config).parameters().as_slice())?)
}

/// Opens the model in a Hugging Face directory, a GGUF file or a directory with an adapter; also says how many blocks its cache has.
pub fn open(path: &Path, options: &OpenOptions, device: &Device) -> Result<(Arc<ModelFacts>, Runner, u32)> {
    let files = match &options.weights {
        Some(weights) => ModelFiles::open_with_weights(path, weights)?,
        None => ModelFiles::open_on(path, options.base.as_deref())?,
    };
    let ModelConfig::Decoder(config) = files.model()? else {
        return Err(ServeError::NoDecoder(path.to_path_buf()));
    };
    let codec = codec_of(&files, config.vocab)?;
    let model = match &options.ranks {
        Some((group, division)) => Decoder::spread(*config, &division.spread(group))?,
        None => Decoder::new(*config),
    };
    files.weights().check(model.parameters().as_slice())?;
    if options.ranks.is_some() && model.page_bytes_per_text() > 0 {
        let why = "a model with layers in linear time is served by one process: what they keep of texts is not told to others";
        return Err(ServeError::Together(why.into()));
    }
    let dtype = options.dtype.as_deref().and_then(dtype_of_name).unwrap_or(files.dtype());
    let store = attach(&model, &files, dtype, device, options)?;
    let block_bytes = (model.page_bytes_per_token() * BLOCK_TOKENS) as u64;
    let useful = model.longest_paged().div_ceil(BLOCK_TOKENS).saturating_mul(options.running.max(1));
    let blocks = (options.cache_bytes / block_bytes.max(1)).min(useful as u64);
    let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
    if blocks == 0 {
        return Err(ServeError::CacheTooSmall { bytes: options.cache_bytes, block_bytes });
    }
    let mut ends = files.end_tokens()?;
    ends.extend(codec.end_token().map(i64::from));
    let named = || {
        let path = path.canonicalize().ok()?;
        let name = if path.is_file() { path.file_stem() } else { path.file_name() };
        name.map(|name| name.to_string_lossy().into_owned())
    };
    let template = match files.text() {
        TextFiles::In(directory) => ChatTemplate::of_model(directory)?,
        TextFiles::Held { config, .. } => ChatTemplate::of_config(path, config)?,
    };
    let facts = ModelFacts {
        name: options.name.clone().or_else(named).unwrap_or_else(|| "model".into()),
        template,
        end_tokens: ends,
        vocabulary: model.config().vocab,
        longest: model.longest_paged(),
        text_bytes: model.page_bytes_per_text(),
        codec,
    };
    let ranks = options.ranks.as_ref().map(|(group, _)| group);
    let runner = Runner::new(Arc::new(model), blocks, device, store)?.led(ranks);
    Ok((Arc::new(facts), runner, blocks))
}

/// Reads the weights; those that the files hold in few bits stay so, others are packed where it is asked for. Gives the store
/// of weights that come and go.
fn attach(
    model: &Decoder,
    files: &ModelFiles,
    dtype: DType,
    device: &Device,
    options: &OpenOptions,
) -> Result<Option<Arc<ZeroStore>>> {
    let (asked, weights, directory) = (options.packed, files.source(), files.path());
    let rank = options.ranks.as_ref().map_or(0, |(group, _)| group.rank());
    let all = model.parameters();
    let is_own = |param: &&Param| all.holder(param).is_none_or(|holder| holder.rank == rank);
    let own: Parameters = all.as_slice().iter().filter(is_own).cloned().collect();
    let params = own.as_slice();
    // Tables, which files may hold in few bits too, are looked up whole; a GPU multiplies all experts at once, by whole weights.
    let is_whole = |param: &Param| !device.backend().is_host() && param.name().contains(".experts.");
    let packing_of = |param: &Param| {
        let bits = asked.or_else(|| files.weights().packed(param)).filter(|_| !is_whole(param))?;
        model.packing(param, bits)
    };
    let is_packed = params.iter().any(|param| packing_of(param).is_some());
    if options.home.is_away(device) {
        if is_packed {
            return Err(ServeError::PackedAway(directory.to_path_buf()));
        }
        return Ok(Some(attach_away(&own, dtype, device, weights, &options.home)?));
    }
    // Parameters hold their store.
    if is_packed {
        PackedStore::attach(params, dtype, device, weights, packing_of)?;
    } else if asked.is_some() {
        return Err(ServeError::NothingToPack(directory.to_path_buf()));
    } else {
        PlainStore::attach(params, dtype, device, weights)?;
    }
    Ok(None)
}
