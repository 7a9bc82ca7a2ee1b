//! A model that is ready to serve: weights in memory, tokenizer, chat template, cache.

use std::path::Path;
use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_data::Codec;
use ferrospeed_models::decoder::dtype_of_name;
use ferrospeed_models::weights::WeightFiles;
use ferrospeed_models::{Decoder, ModelConfig, ModelFiles, PageSteps, TextFiles};
use ferrospeed_nn::AttentionState;
use ferrospeed_nn::tensor_parallel::Between;
use ferrospeed_tensor::store::{PackedStore, PlainStore};
use ferrospeed_tensor::{DType, Device, PackedBits, PagedRows, PagedSequence, Param, Tensor, ops};

use crate::core::pool::BLOCK_TOKENS;
use crate::core::schedule::{Scheduler, Share};
use crate::error::{Result, ServeError};
use crate::sampling::likeliest;
use crate::template::ChatTemplate;
use crate::together::{Lead, Pass};

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
    /// For passes in which every text gets one token, where the device gains by it.
    steps: Option<PageSteps>,
    /// Where the model is in slices and this rank the first.
    lead: Option<Lead>,
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
    /// The ranks that hold the model in slices, all of which open it; the first one serves.
    pub slices: Option<Group>,
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
pub fn check(path: &Path, slices: usize) -> Result<()> {
    let files = ModelFiles::open(path)?;
    let ModelConfig::Decoder(config) = files.model()? else {
        return Err(ServeError::NoDecoder(path.to_path_buf()));
    };
    codec_of(&files, config.vocab)?;
    config.check_slices(slices, Between::AllTokens)?;
    Ok(files.weights().check(Decoder::new(*config).parameters().as_slice())?)
}

/// Opens the model in a Hugging Face directory or a GGUF file; also says how many blocks its cache has.
pub fn open(path: &Path, options: &OpenOptions, device: &Device) -> Result<(Arc<ModelFacts>, Runner, u32)> {
    let files = ModelFiles::open(path)?;
    let ModelConfig::Decoder(config) = files.model()? else {
        return Err(ServeError::NoDecoder(path.to_path_buf()));
    };
    let codec = codec_of(&files, config.vocab)?;
    let model = match &options.slices {
        Some(group) => Decoder::in_slices(*config, group)?,
        None => Decoder::new(*config),
    };
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
    let steps = PageSteps::new(&model, BLOCK_TOKENS, &state)?;
    let lead = options.slices.as_ref().filter(|group| group.rank() == 0 && group.size() > 1).map(Lead::new);
    Ok((Arc::new(facts), Runner { model, state, device: device.clone(), steps, lead }, blocks))
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
    // Tables, which files may hold in few bits too, are looked up whole; a GPU multiplies all experts at once, by whole weights.
    let is_whole = |param: &Param| !device.backend().is_host() && param.name().contains(".experts.");
    let packing_of = |param: &Param| {
        let bits = asked.or_else(|| weights.packed(param)).filter(|_| !is_whole(param))?;
        model.packing(param, bits)
    };
    // Parameters hold their store.
    if params.iter().any(|param| packing_of(param).is_some()) {
        PackedStore::attach(params, dtype, device, weights, packing_of)?;
    } else if asked.is_some() {
        return Err(ServeError::NothingToPack(directory.to_path_buf()));
    } else {
        PlainStore::attach(params, dtype, device, weights)?;
    }
    Ok(())
}

/// What is wanted of a share whose next token can be chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// The logits behind its last token and behind each guess.
    Logits,
    /// As much of them as says which token is the likeliest.
    Likeliest,
    /// The last hidden state.
    Hidden,
}

/// What a pass says of the tokens that may follow one.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// The logits of all tokens.
    Logits(Vec<f32>),
    /// The likeliest token.
    Likeliest(i64),
}

/// What a pass says of the sequences whose next token can be chosen, in the order of their shares.
#[derive(Debug, Default)]
pub struct PassResult {
    /// For every share that asked for tokens what may follow, and once more behind each of its guesses.
    pub next: Vec<Said>,
    /// The last hidden state for every share that asked for that.
    pub hidden: Vec<Vec<f32>>,
}

impl Runner {
    /// Computes a plan. `wish` says of a share that chooses what it wants.
    pub fn pass(
        &mut self,
        scheduler: &Scheduler,
        shares: &[Share],
        wish: impl Fn(&Share) -> Wish,
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
                match wish(share) {
                    Wish::Hidden => of_hidden.push(last - share.guessed as i64),
                    Wish::Logits | Wish::Likeliest => of_logits.extend(last - share.guessed as i64..=last),
                }
            }
        }
        let rows = Arc::new(rows);
        if of_logits.len() == ids.len()
            && let Some(next) = self.step(&ids, &rows, shares, wish)?
        {
            return Ok(PassResult { next, hidden: Vec::new() });
        }
        let (hidden, logits) = self.compute(&Pass { ids, rows, of_logits })?;
        let mut result = PassResult::default();
        if let Some(logits) = logits {
            result.next = lines(&logits)?.into_iter().map(Said::Logits).collect();
        }
        if !of_hidden.is_empty() {
            result.hidden = lines(&self.rows(&hidden, &of_hidden)?)?;
        }
        Ok(result)
    }

    /// Hidden states of all rows, and the logits that are wanted. With slices, all ranks compute it together.
    pub(crate) fn compute(&mut self, pass: &Pass) -> Result<(Tensor, Option<Tensor>)> {
        let Pass { ids, rows, of_logits } = pass;
        if let Some(lead) = &mut self.lead {
            // What the model refuses the others need not hear of.
            self.model.check_pages(ids, rows)?;
            lead.pass(pass)?;
        }
        let computed = self.compute_here(ids, rows, of_logits);
        if let (Err(_), Some(lead)) = (&computed, &mut self.lead) {
            lead.lose();
        }
        computed
    }

    fn compute_here(
        &mut self,
        ids: &[i64],
        rows: &Arc<PagedRows>,
        of_logits: &[i64],
    ) -> Result<(Tensor, Option<Tensor>)> {
        let hidden = self.hidden(ids, rows)?;
        let logits = match of_logits.is_empty() {
            true => None,
            false => Some(self.model.page_logits(&self.rows(&hidden, of_logits)?)?),
        };
        Ok((hidden, logits))
    }

    /// Whether the ranks that hold the model have lost each other.
    pub fn is_lost(&self) -> bool {
        self.lead.as_ref().is_some_and(Lead::is_lost)
    }

    /// To be called now and then where there is nothing to compute.
    pub fn stay(&mut self) -> Result<()> {
        self.lead.as_mut().map_or(Ok(()), Lead::stay)
    }

    /// A pass in which every text gets one token, where the device has a short way for that.
    fn step(
        &mut self,
        ids: &[i64],
        rows: &Arc<PagedRows>,
        shares: &[Share],
        wish: impl Fn(&Share) -> Wish,
    ) -> Result<Option<Vec<Said>>> {
        let Some(steps) = &mut self.steps else { return Ok(None) };
        let Some(next) = steps.run(&self.model, ids, rows, &mut self.state)? else { return Ok(None) };
        // A logit that is no number says that there is none: all of them are looked at then.
        let needs_all =
            |row: &usize| wish(&shares[*row]) == Wish::Logits || !next.likeliest[*row].1.is_finite();
        let whole: Vec<i64> = (0..ids.len()).filter(needs_all).map(|row| row as i64).collect();
        let mut said: Vec<Said> = next.likeliest.iter().map(|(token, _)| Said::Likeliest(*token)).collect();
        if !whole.is_empty() {
            for (row, logits) in whole.iter().zip(lines(&next.logits(&whole)?)?) {
                said[*row as usize] = Said::Logits(logits);
            }
        }
        Ok(Some(said))
    }

    /// The likeliest token behind each of the rows `of`.
    pub(crate) fn likeliest(&mut self, ids: &[i64], rows: &Arc<PagedRows>, of: &[i64]) -> Result<Vec<i64>> {
        if let Some(steps) = &mut self.steps
            && of.len() == ids.len()
            && let Some(next) = steps.run(&self.model, ids, rows, &mut self.state)?
        {
            return Ok(next.likeliest.iter().map(|(token, _)| *token).collect());
        }
        let pass = Pass { ids: ids.to_vec(), rows: Arc::clone(rows), of_logits: of.to_vec() };
        let Some(logits) = self.compute(&pass)?.1 else { return Ok(Vec::new()) };
        Ok(lines(&logits)?.iter().map(|row| likeliest(row) as i64).collect())
    }

    fn hidden(&mut self, ids: &[i64], rows: &Arc<PagedRows>) -> Result<Tensor> {
        Ok(match &self.steps {
            Some(steps) => steps.hidden(&self.model, ids, rows, &mut self.state)?,
            None => self.model.run_pages(ids, rows, &mut self.state)?,
        })
    }

    fn rows(&self, hidden: &Tensor, rows: &[i64]) -> Result<Tensor> {
        Ok(ops::index_select(hidden, 0, &Tensor::from_slice(rows, [rows.len()], &self.device)?)?)
    }
}

fn lines(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
    let width = tensor.shape().last().max(1);
    Ok(ops::cast(tensor, DType::F32)?.to_vec::<f32>()?.chunks(width).map(<[f32]>::to_vec).collect())
}
