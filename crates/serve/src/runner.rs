//! A pass through the model: tokens of many sequences in, what may follow them out.

use std::sync::Arc;

use ferrospeed_comm::Group;
use ferrospeed_models::{Decoder, PageSteps};
use ferrospeed_nn::AttentionState;
use ferrospeed_tensor::{DType, Device, PagedRows, PagedSequence, Tensor, ops};
use ferrospeed_zero::{Pass as Reads, ZeroStore};

use crate::core::pool::BLOCK_TOKENS;
use crate::core::schedule::{Limits, Scheduler, Share};
use crate::error::Result;
use crate::known::Known;
use crate::paired::Likelihoods;
use crate::sampling::likeliest;
use crate::together::{Lead, Pass};

/// Weights and cache: what passes run on.
pub struct Runner {
    model: Arc<Decoder>,
    state: AttentionState,
    device: Device,
    /// For passes in which every text gets one token, where the device gains by it.
    steps: Option<PageSteps>,
    /// Where several ranks hold the model and this is the first.
    lead: Option<Lead>,
    /// Where weights come and go with a pass or change between two: it is told when one begins.
    store: Option<Arc<ZeroStore>>,
    /// Where ranks bring each other the weights: a block of nobody's, for passes that only take part.
    spare: Option<u32>,
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
    /// How likely the tokens from `from` on are, and as many `alternatives` to each.
    Known {
        /// The first of them.
        from: usize,
        /// How many.
        alternatives: usize,
    },
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
    /// For every share that asked for known tokens, those that its own rows predict.
    pub known: Vec<Vec<Likelihoods>>,
}

/// Rows of logits that are held at a time.
const LOGIT_ROWS: usize = 128;

impl Runner {
    /// A cache of so many blocks for a model whose weights have their place.
    pub fn new(
        model: Arc<Decoder>,
        blocks: u32,
        device: &Device,
        store: Option<Arc<ZeroStore>>,
    ) -> Result<Runner> {
        let state = model.new_pages(blocks as usize, BLOCK_TOKENS, device)?;
        let steps = PageSteps::new(&model, BLOCK_TOKENS, &state)?;
        Ok(Runner { model, state, device: device.clone(), steps, lead: None, store, spare: None })
    }

    /// The same where every pass meets those of other ranks: each of them reads all weights, and one that has nothing to compute
    /// takes part by [`Runner::accompany`].
    pub fn new_meeting(
        model: Arc<Decoder>,
        blocks: u32,
        device: &Device,
        store: Option<Arc<ZeroStore>>,
    ) -> Result<Runner> {
        let runner = Runner::new(model, blocks + 1, device, store)?;
        Ok(Runner { steps: None, spare: Some(blocks), ..runner })
    }

    /// The same where ranks hold the model together: the first of them tells the others what to compute.
    pub(crate) fn led(self, ranks: Option<&Group>) -> Runner {
        let lead = ranks.filter(|group| group.rank() == 0 && group.size() > 1).map(Lead::new);
        Runner { lead, ..self }
    }

    /// Takes part in a pass of other ranks.
    pub fn accompany(&mut self) -> Result<()> {
        let blocks = vec![self.spare.unwrap_or(0)];
        let rows = PagedRows { sequences: vec![PagedSequence { first: 0, count: 1, blocks }] };
        self.compute_here(&[0], &Arc::new(rows), &[0], &mut |_, _| Ok(()))?;
        Ok(())
    }

    /// Tells the weights' store that a pass begins.
    fn begin(&self) {
        if let Some(store) = &self.store {
            store.begin_pass(Reads::Generate);
        }
    }

    /// Whether something is kept of texts beside their blocks: then no text begins with what another has computed, and none takes
    /// back what it has.
    pub fn keeps_texts(&self) -> bool {
        self.model.page_bytes_per_text() > 0
    }

    /// Who plans passes of this model.
    pub fn scheduler(&self, limits: Limits, blocks: u32) -> Scheduler {
        let scheduler = Scheduler::new(limits, blocks);
        if self.keeps_texts() { scheduler.without_sharing() } else { scheduler }
    }

    /// Computes a plan. `wish` says of a share what it wants; of one that does not choose, only known tokens are given. `meanwhile` is called once, while a device computes.
    pub fn pass(
        &mut self,
        scheduler: &Scheduler,
        shares: &[Share],
        wish: impl Fn(&Share) -> Wish,
        meanwhile: impl FnOnce(),
    ) -> Result<PassResult> {
        if self.keeps_texts() {
            self.state.keep_texts(&scheduler.first_blocks());
        }
        let mut meanwhile = Some(meanwhile);
        let mut meanwhile = || meanwhile.take().into_iter().for_each(|work| work());
        let (mut rows, mut ids) = (PagedRows::default(), Vec::new());
        let (mut of_logits, mut of_hidden, mut known) = (Vec::new(), Vec::new(), Known::default());
        for share in shares {
            let Some(sequence) = scheduler.sequence(share.id) else { continue };
            ids.extend_from_slice(&sequence.tokens()[share.first..share.first + share.count - share.guessed]);
            ids.extend_from_slice(&sequence.guesses()[..share.guessed]);
            let blocks = sequence.blocks().iter().map(|block| block.0).collect();
            rows.sequences.push(PagedSequence { first: share.first, count: share.count, blocks });
            let last = ids.len() as i64 - 1;
            match wish(share) {
                Wish::Known { from, alternatives } => {
                    known.add(share, sequence.tokens(), ids.len() - share.count, from, alternatives);
                }
                _ if !share.chooses => {}
                Wish::Hidden => of_hidden.push(last - share.guessed as i64),
                Wish::Logits | Wish::Likeliest => of_logits.extend(last - share.guessed as i64..=last),
            }
        }
        let rows = Arc::new(rows);
        if of_logits.len() == ids.len()
            && known.rows.is_empty()
            && let Some(next) = self.step(&ids, &rows, shares, wish, &mut meanwhile)?
        {
            return Ok(PassResult { next, ..PassResult::default() });
        }
        let mut result = PassResult::default();
        let choosing = of_logits.len();
        of_logits.extend_from_slice(&known.rows);
        let mut take = |first: usize, logits: &Tensor| {
            let count = logits.shape().rows();
            let split = choosing.saturating_sub(first).min(count);
            if split > 0 {
                let rows = ops::narrow(logits, 0, 0, split)?;
                result.next.extend(lines(&rows)?.into_iter().map(Said::Logits));
            }
            match count - split {
                0 => Ok(()),
                rest => known.take((first + split) - choosing, &ops::narrow(logits, 0, split, rest)?),
            }
        };
        let hidden = self.compute(&Pass { ids, rows, of_logits }, &mut take)?;
        meanwhile();
        result.known = known.given();
        if !of_hidden.is_empty() {
            result.hidden = lines(&self.rows(&hidden, &of_hidden)?)?;
        }
        Ok(result)
    }

    /// Hidden states of all rows; `take` is given the logits that are wanted, a few rows at a time, and the number of the first.
    /// Ranks that hold the model together compute it together.
    pub(crate) fn compute(&mut self, pass: &Pass, take: TakeLogits<'_>) -> Result<Tensor> {
        let Pass { ids, rows, of_logits } = pass;
        if let Some(lead) = &mut self.lead {
            // What the model refuses the others need not hear of.
            self.model.check_pages(ids, rows)?;
            lead.pass(pass)?;
        }
        let computed = self.compute_here(ids, rows, of_logits, take);
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
        take: TakeLogits<'_>,
    ) -> Result<Tensor> {
        self.begin();
        let hidden = self.hidden(ids, rows)?;
        if of_logits.is_empty() && self.spare.is_some() {
            // Nobody asks, but other ranks wait for this one's part of the head.
            self.model.page_logits(&self.rows(&hidden, &[ids.len() as i64 - 1])?)?;
        }
        for (index, wanted) in of_logits.chunks(LOGIT_ROWS).enumerate() {
            take(index * LOGIT_ROWS, &self.model.page_logits(&self.rows(&hidden, wanted)?)?)?;
        }
        Ok(hidden)
    }

    /// Whether a device computes while this thread does something else.
    pub fn computes_beside(&self) -> bool {
        !self.device.backend().is_host()
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
        meanwhile: impl FnOnce(),
    ) -> Result<Option<Vec<Said>>> {
        if self.steps.is_some() {
            self.begin();
        }
        let Some(steps) = &mut self.steps else { return Ok(None) };
        let Some(next) = steps.run(&self.model, ids, rows, &mut self.state, meanwhile)? else {
            return Ok(None);
        };
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
        if self.steps.is_some() {
            self.begin();
        }
        if let Some(steps) = &mut self.steps
            && of.len() == ids.len()
            && let Some(next) = steps.run(&self.model, ids, rows, &mut self.state, || ())?
        {
            return Ok(next.likeliest.iter().map(|(token, _)| *token).collect());
        }
        let pass = Pass { ids: ids.to_vec(), rows: Arc::clone(rows), of_logits: of.to_vec() };
        let mut found = Vec::with_capacity(of.len());
        self.compute(&pass, &mut |_, logits| {
            found.extend(lines(logits)?.iter().map(|row| likeliest(row) as i64));
            Ok(())
        })?;
        Ok(found)
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

/// Who takes logits as they come.
pub(crate) type TakeLogits<'a> = &'a mut dyn FnMut(usize, &Tensor) -> Result<()>;

pub(crate) fn lines(tensor: &Tensor) -> Result<Vec<Vec<f32>>> {
    let width = tensor.shape().last().max(1);
    Ok(ops::cast(tensor, DType::F32)?.to_vec::<f32>()?.chunks(width).map(<[f32]>::to_vec).collect())
}
