//! A model that is ready to serve: weights in memory, tokenizer, chat template, cache.

use std::path::Path;
use std::sync::Arc;

use ferrospeed_data::Codec;
use ferrospeed_models::decoder::dtype_of_name;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles, TextFiles};
use ferrospeed_nn::AttentionState;
use ferrospeed_tensor::store::{PackedStore, PlainStore};
use ferrospeed_tensor::{DType, Device, PackedBits, PagedRows, PagedSequence, Param, Tensor, ops};

use crate::core::pool::BLOCK_TOKENS;
use crate::core::schedule::{Scheduler, Share};
use crate::error::{Result, ServeError};
use crate::template::ChatTemplate;

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
}

/// Weights and cache: what passes run on.
pub struct Runner {
    model: Decoder,
    state: AttentionState,
    device: Device,
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

/// Opens the model in a Hugging Face directory or a GGUF file; also says how many blocks its cache has.
pub fn open(path: &Path, options: &OpenOptions, device: &Device) -> Result<(Arc<ModelFacts>, Runner, u32)> {
    let files = ModelFiles::open(path)?;
    let ModelConfig::Decoder(config) = files.model()? else {
        return Err(ServeError::NoDecoder(path.to_path_buf()));
    };
    let codec = codec_of(&files, config.vocab)?;
    let model = Decoder::new(*config);
    files.weights().check(model.parameters().as_slice())?;
    let dtype = options.dtype.as_deref().and_then(dtype_of_name).unwrap_or(files.dtype());
    attach(&model, path, dtype, device, files.weights(), options.packed)?;
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
        codec,
    };
    let state = model.new_pages(blocks as usize, BLOCK_TOKENS, device)?;
    Ok((Arc::new(facts), Runner { model, state, device: device.clone() }, blocks))
}

/// Reads the weights; those that the files hold in few bits stay so, others are packed where it is asked for.
fn attach(
    model: &Decoder,
    directory: &Path,
    dtype: DType,
    device: &Device,
    weights: &WeightFiles,
    asked: Option<PackedBits>,
) -> Result<()> {
    let params = model.parameters().as_slice();
    // Tables, which files may hold in few bits too, are looked up whole.
    let packing_of =
        |param: &Param| asked.or_else(|| weights.packed(param)).and_then(|bits| model.packing(param, bits));
    // Parameters hold their store.
    if params.iter().any(|param| packing_of(param).is_some()) {
        if !device.backend().is_host() {
            return Err(ServeError::PackedElsewhere { device: device.backend().name() });
        }
        PackedStore::attach(params, dtype, device, weights, packing_of)?;
    } else if asked.is_some() {
        return Err(ServeError::NothingToPack(directory.to_path_buf()));
    } else {
        PlainStore::attach(params, dtype, device, weights)?;
    }
    Ok(())
}

/// What a pass says of the sequences whose next token can be chosen, in the order of their shares.
#[derive(Debug, Default)]
pub struct PassResult {
    /// For every share that asked for logits a row of the vocabulary, and one more behind each of its guesses.
    pub logits: Vec<Vec<f32>>,
    /// The last hidden state for every share that asked for that.
    pub hidden: Vec<Vec<f32>>,
}

impl Runner {
    /// Computes a plan. `wants_hidden` says of a share that chooses whether it wants the hidden state instead of logits.
    pub fn pass(
        &mut self,
        scheduler: &Scheduler,
        shares: &[Share],
        wants_hidden: impl Fn(&Share) -> bool,
    ) -> Result<PassResult> {
        let (mut rows, mut ids) = (PagedRows::default(), Vec::new());
        let (mut of_logits, mut of_hidden) = (Vec::new(), Vec::new());
        for share in shares {
            let Some(sequence) = scheduler.sequence(share.id) else { continue };
            ids.extend_from_slice(&sequence.tokens()[share.first..share.first + share.count - share.guessed]);
            ids.extend_from_slice(&sequence.guesses()[..share.guessed]);
            let blocks = sequence.blocks().iter().map(|block| block.0).collect();
            rows.sequences.push(PagedSequence { first: share.first, count: share.count, blocks });
            if share.chooses {
                let last = ids.len() as i64 - 1;
                match wants_hidden(share) {
                    true => of_hidden.push(last - share.guessed as i64),
                    false => of_logits.extend(last - share.guessed as i64..=last),
                }
            }
        }
        let hidden = self.model.run_pages(&ids, &Arc::new(rows), &mut self.state)?;
        let mut result = PassResult::default();
        if !of_logits.is_empty() {
            result.logits = lines(&self.model.page_logits(&self.rows(&hidden, &of_logits)?)?)?;
        }
        if !of_hidden.is_empty() {
            result.hidden = lines(&self.rows(&hidden, &of_hidden)?)?;
        }
        Ok(result)
    }

    fn rows(&self, hidden: &Tensor, rows: &[i64]) -> Result<Tensor> {
        Ok(ops::index_select(hidden, 0, &Tensor::from_slice(rows, [rows.len()], &self.device)?)?)
    }
}

fn lines(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
    let width = tensor.shape().last().max(1);
    Ok(ops::cast(tensor, DType::F32)?.to_vec::<f32>()?.chunks(width).map(<[f32]>::to_vec).collect())
}
