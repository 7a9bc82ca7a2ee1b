//! The next token of many sequences at once: passes over pages with one row each, recorded once where the device can.
//!
//! What changes from pass to pass (tokens, places, blocks) lies in tensors that are made once, and so do the results. Passes are
//! recorded for powers of two of sequences and of tokens that these see; rows that a pass does not need are nobody's.
//!
//! Other passes, with pieces of prompts, get as many rows as a few sizes have: for each new one a device's libraries think about
//! how to multiply.

use std::collections::HashMap;
use std::sync::Arc;

use ferrospeed_nn::{AttentionState, Mode};
use ferrospeed_tensor::pages::CHUNK;
use ferrospeed_tensor::{
    DType, Device, Out, PageMap, PagedRows, Pages, Param, Recording, Tensor, autograd, ops, rows_alone,
};

use super::{Decoder, StepTables};
use crate::error::Result;
use crate::stepper::record;

/// The most sequences of a recorded pass.
const MOST_ROWS: usize = 256;

/// Passes that give many sequences one token each.
pub struct PageSteps {
    tables: StepTables,
    device: Device,
    /// Tokens of a block of the cache.
    block_tokens: usize,
    /// By sequences, and tokens that each can see.
    steps: HashMap<[usize; 2], PageStep>,
}

/// What a pass says of the next tokens, in the order of the sequences.
pub struct NextTokens<'a> {
    /// The likeliest token of each, and its logit.
    pub likeliest: Vec<(i64, f32)>,
    logits: &'a Tensor,
}

impl NextTokens<'_> {
    /// The logits of these sequences.
    pub fn logits(&self, rows: &[i64]) -> Result<Tensor> {
        let rows = Tensor::from_slice(rows, [rows.len()], self.logits.device())?;
        Ok(ops::index_select(self.logits, 0, &rows)?)
    }
}

struct PageStep {
    map: Arc<PageMap>,
    /// `[3 × rows]` of i64: tokens, places, and rows in the table of learned positions.
    inputs: Tensor,
    /// `[rows, vocabulary]`.
    logits: Tensor,
    /// `[rows, 1]` each: the largest logit, as f32, and its token.
    largest: [Tensor; 2],
    recording: Option<Recording>,
    passes: usize,
}

impl PageSteps {
    /// `None` where it would spare nothing: on the host, and where a pass cannot be recorded.
    pub fn new(model: &Decoder, block_tokens: usize, state: &AttentionState) -> Result<Option<PageSteps>> {
        let device = model.device_of(state)?;
        let backend = device.backend();
        // What other ranks hold, slices or experts, has no value that stays here.
        let can = !backend.is_host()
            && model.slices.is_none()
            // What is kept of texts lies elsewhere after each pass.
            && model.page_bytes_per_text() == 0
            && backend.reads_pages(model.dtype(), model.config.head_dim)
            && model.parameters().as_slice().iter().all(Param::value_stays);
        if !can {
            return Ok(None);
        }
        let longest = model.longest_paged();
        let Some(tables) = model.step_tables(longest, &device)? else { return Ok(None) };
        Ok(Some(PageSteps { tables, device, block_tokens, steps: HashMap::new() }))
    }

    /// The hidden states of any pass, as [`Decoder::run_pages`] gives them.
    pub fn hidden(
        &self,
        model: &Decoder,
        ids: &[i64],
        rows: &Arc<PagedRows>,
        state: &mut AttentionState,
    ) -> Result<Tensor> {
        let (places, _) = model.check_pages(ids, rows)?;
        let (own, count) = (ids.len(), row_count(ids.len()));
        let inputs = Tensor::from_slice(
            &inputs(count, ids, &places, self.tables.row_offset),
            [3 * count],
            &self.device,
        )?;
        let group = model.config.heads / model.config.kv_heads;
        let pages = Pages::padded(Arc::clone(rows), group, count, &self.device)?;
        let hidden = autograd::no_grad(|| rows_alone(|| run(model, &self.tables, &inputs, pages, state)))?;
        Ok(hidden.slice(0, [own, model.config.embedding_width])?)
    }

    /// Runs `ids`, the newest token of every sequence, and does something else meanwhile. `None`: these rows are none that it
    /// takes, and nothing was done.
    pub fn run(
        &mut self,
        model: &Decoder,
        ids: &[i64],
        rows: &Arc<PagedRows>,
        state: &mut AttentionState,
        meanwhile: impl FnOnce(),
    ) -> Result<Option<NextTokens<'_>>> {
        let single = rows.sequences.iter().all(|one| one.count == 1);
        if !single || ids.is_empty() || ids.len() > MOST_ROWS || rows.sequences.len() != ids.len() {
            return Ok(None);
        }
        let places = rows.places();
        let longest = places.iter().max().map_or(1, |place| place + 1);
        model.check_rows(ids, &places, longest)?;
        let size = [ids.len().next_power_of_two(), longest.next_power_of_two().max(CHUNK)];
        if !self.steps.contains_key(&size) {
            self.steps.insert(size, PageStep::new(model, size, self.block_tokens, &self.device)?);
        }
        let Some(step) = self.steps.get_mut(&size) else { return Ok(None) };
        step.fill(ids, &places, rows, self.tables.row_offset)?;
        // The first pass compiles kernels and chooses algorithms, which is no part of a recording.
        if step.passes == 1 {
            step.recording = record(&self.device, || step.work(model, &self.tables, rows, state))?;
        }
        step.passes += 1;
        match &step.recording {
            Some(recording) => recording.replay()?,
            None => step.work(model, &self.tables, rows, state)?,
        }
        // Both reads are under way before either is waited for.
        let backend = self.device.backend();
        let [largest, tokens] =
            [backend.read_later(&step.largest[0])?, backend.read_later(&step.largest[1])?];
        meanwhile();
        let (largest, tokens) = (largest()?, tokens()?);
        let numbers = bytemuck::cast_slice::<u8, [u8; 8]>(&tokens).iter().copied().map(i64::from_ne_bytes);
        let logits = bytemuck::cast_slice::<u8, [u8; 4]>(&largest).iter().copied().map(f32::from_ne_bytes);
        let likeliest = numbers.zip(logits).take(ids.len()).collect();
        Ok(Some(NextTokens { likeliest, logits: &step.logits }))
    }
}

impl PageStep {
    fn new(
        model: &Decoder,
        [rows, longest]: [usize; 2],
        block_tokens: usize,
        device: &Device,
    ) -> Result<PageStep> {
        let config = model.config();
        let map =
            PageMap::for_single_rows(rows, config.heads / config.kv_heads, block_tokens, longest, device)?;
        Ok(PageStep {
            map: Arc::new(map),
            inputs: Tensor::zeros([3 * rows], DType::I64, device)?,
            logits: Tensor::zeros([rows, config.vocab], model.dtype(), device)?,
            largest: [
                Tensor::zeros([rows, 1], DType::F32, device)?,
                Tensor::zeros([rows, 1], DType::I64, device)?,
            ],
            recording: None,
            passes: 0,
        })
    }

    fn rows(&self) -> usize {
        self.inputs.numel() / 3
    }

    fn fill(&self, ids: &[i64], places: &[usize], rows: &PagedRows, row_offset: usize) -> Result<()> {
        let inputs = inputs(self.rows(), ids, places, row_offset);
        let target = Out::of_device(&self.inputs)?;
        target.device().backend().copy_from_host(bytemuck::cast_slice(&inputs), target)?;
        Ok(self.map.fill(rows)?)
    }

    fn work(
        &self,
        model: &Decoder,
        tables: &StepTables,
        rows: &Arc<PagedRows>,
        state: &mut AttentionState,
    ) -> Result<()> {
        let pages = Pages { rows: Arc::clone(rows), map: Some(Arc::clone(&self.map)) };
        let pass = || -> Result<Tensor> { model.logits(&run(model, tables, &self.inputs, pages, state)?) };
        let logits = autograd::no_grad(|| rows_alone(pass))?;
        let (largest, tokens) = ops::top_k(&logits, 1)?;
        let backend = logits.device().backend();
        backend.copy(&logits, Out::of_device(&self.logits)?)?;
        backend.cast(&largest, Out::of_device(&self.largest[0])?)?;
        Ok(backend.copy(&tokens, Out::of_device(&self.largest[1])?)?)
    }
}

/// Tokens, places and rows in the table of learned positions, each for `count` rows; those that a pass does not have are zeros.
fn inputs(count: usize, ids: &[i64], places: &[usize], row_offset: usize) -> Vec<i64> {
    let mut inputs = vec![0i64; 3 * count];
    inputs[..ids.len()].copy_from_slice(ids);
    for (row, &place) in places.iter().enumerate() {
        inputs[count + row] = place as i64;
        inputs[2 * count + row] = (place + row_offset) as i64;
    }
    inputs
}

/// The hidden states `[rows, width]` of [`inputs`].
fn run(
    model: &Decoder,
    tables: &StepTables,
    inputs: &Tensor,
    pages: Pages,
    state: &mut AttentionState,
) -> Result<Tensor> {
    let count = inputs.numel() / 3;
    let input = |part: usize, shape: &[usize]| inputs.slice(part * count, shape);
    let places = tables.of_pages(&input(1, &[count])?, &input(2, &[1, count])?, pages)?;
    let (hidden, _) = model.run_at(&input(0, &[1, count])?, &places, Some(state), Mode::Evaluate, None)?;
    Ok(hidden.view([count, model.config.embedding_width])?)
}

/// How many rows a pass gets that has `rows`: at most an eighth more.
fn row_count(rows: usize) -> usize {
    let step = (rows.next_power_of_two() / 16).max(8);
    rows.next_multiple_of(step)
}
