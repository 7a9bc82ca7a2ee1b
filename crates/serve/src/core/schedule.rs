//! Which tokens the next pass computes.
//!
//! A sequence is a list of known tokens, of which the first so many are computed: their keys and values lie in its blocks.
//! One rule covers everything: a pass computes, oldest sequence first, as many of each one's known tokens as the pass has
//! room for; where it computes the last known one, a new token can be chosen. A long prompt that goes in over several passes,
//! a beginning that another sequence has already computed, and a text that grows by a token are all the same to it. Behind the
//! last known token a pass may compute guesses at what follows; those that turn out to be chosen are computed then.
//!
//! When no block is left the youngest sequence gives its blocks back and waits; later it computes them again, or finds what
//! is still there. A sequence that could never fit is refused at the door, so the oldest one always gets on, and nothing
//! waits for ever.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error;

use super::pool::{BLOCK_TOKENS, BlockId, BlockPool, ContentHash};

/// What bounds the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Tokens of a pass.
    pub pass_tokens: usize,
    /// Sequences that hold blocks at once.
    pub running: usize,
    /// Sequences that wait.
    pub waiting: usize,
    /// Tokens of a sequence, prompt and answer together.
    pub sequence_tokens: usize,
}

/// A sequence; older ones have smaller numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(pub u64);

/// Why a sequence is not taken.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    /// Nothing to begin with.
    #[error("the prompt is empty; send at least one token")]
    Empty,
    /// It could never be held.
    #[error(
        "{tokens} tokens of prompt and answer are asked for, and {most} fit; shorten the prompt or max_tokens"
    )]
    TooLong {
        /// Asked for.
        tokens: usize,
        /// Possible.
        most: usize,
    },
    /// Too many wait already.
    #[error("{waiting} requests are waiting already; try again later")]
    QueueFull {
        /// How many.
        waiting: usize,
    },
}

/// A sequence's part of a pass: tokens `first..first + count` of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// Whose.
    pub id: SequenceId,
    /// The first token that is computed.
    pub first: usize,
    /// How many are.
    pub count: usize,
    /// How many of these are guesses, at the end.
    pub guessed: usize,
    /// Whether the last known token is among them, so that the next can be chosen.
    pub chooses: bool,
}

/// What is known of a sequence.
#[derive(Debug)]
pub struct Sequence {
    tokens: Vec<i64>,
    /// What may follow, as the last plan has it.
    guesses: Vec<i64>,
    computed: usize,
    blocks: Vec<BlockId>,
    /// Of its full blocks, as far as they are known.
    contents: Vec<ContentHash>,
    most_tokens: usize,
    /// Tokens from this one on are computed for it, even where another sequence has computed them.
    own_from: usize,
}

impl Sequence {
    /// Prompt and answer so far.
    pub fn tokens(&self) -> &[i64] {
        &self.tokens
    }

    /// What a plan guesses to follow.
    pub fn guesses(&self) -> &[i64] {
        &self.guesses
    }

    /// Where its keys and values lie, in order.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Whether only its newest token is left to compute.
    pub fn is_growing(&self) -> bool {
        self.computed > 0 && self.computed + 1 == self.tokens.len()
    }

    /// How many tokens it may have.
    pub fn most_tokens(&self) -> usize {
        self.most_tokens
    }

    fn content(&mut self, block: usize) -> ContentHash {
        while self.contents.len() <= block {
            let index = self.contents.len();
            let tokens = &self.tokens[index * BLOCK_TOKENS..(index + 1) * BLOCK_TOKENS];
            self.contents.push(ContentHash::of(self.contents.last(), tokens));
        }
        self.contents[block]
    }
}

/// Counters since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Sequences that had to give their blocks back.
    pub preemptions: u64,
    /// Tokens that were found computed already.
    pub shared_tokens: u64,
}

/// All sequences and the blocks they hold.
#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    pool: BlockPool,
    sequences: BTreeMap<SequenceId, Sequence>,
    running: BTreeSet<SequenceId>,
    waiting: BTreeSet<SequenceId>,
    next: u64,
    counters: Counters,
    /// Whether a sequence begins with what another has computed.
    shares: bool,
}

impl Scheduler {
    /// Nothing to do yet. Every limit is at least 1.
    pub fn new(limits: Limits, blocks: u32) -> Scheduler {
        let limits = Limits {
            pass_tokens: limits.pass_tokens.max(1),
            running: limits.running.max(1),
            waiting: limits.waiting.max(1),
            sequence_tokens: limits.sequence_tokens.min(blocks as usize * BLOCK_TOKENS),
        };
        Scheduler {
            limits,
            pool: BlockPool::new(blocks),
            sequences: BTreeMap::new(),
            running: BTreeSet::new(),
            waiting: BTreeSet::new(),
            next: 0,
            counters: Counters::default(),
            shares: true,
        }
    }

    /// The same where every sequence computes all of its tokens: what is kept of a text is more than its blocks hold.
    #[must_use]
    pub fn without_sharing(self) -> Scheduler {
        Scheduler { shares: false, ..self }
    }

    /// The first blocks of all sequences that hold some.
    pub fn first_blocks(&self) -> BTreeSet<u32> {
        let held = self.running.iter().filter_map(|id| self.sequences.get(id)?.blocks.first());
        held.map(|block| block.0).collect()
    }

    /// What bounds it; a sequence never has more tokens than the pool.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// The blocks.
    pub fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// What has happened so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// How many sequences hold blocks, and how many wait.
    pub fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    /// A sequence that has not ended.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence> {
        self.sequences.get(&id)
    }

    /// Takes `count` sequences that begin with `prompt` and grow by `new_tokens` at most, or none of them.
    pub fn submit(
        &mut self,
        prompt: &[i64],
        new_tokens: usize,
        count: usize,
    ) -> Result<Vec<SequenceId>, Refusal> {
        self.submit_own(prompt, new_tokens, count, usize::MAX)
    }

    /// The same where tokens from `own_from` on are computed for each, whoever else has them: something is wanted of every one.
    pub fn submit_own(
        &mut self,
        prompt: &[i64],
        new_tokens: usize,
        count: usize,
        own_from: usize,
    ) -> Result<Vec<SequenceId>, Refusal> {
        if prompt.is_empty() {
            return Err(Refusal::Empty);
        }
        let most_tokens = prompt.len().saturating_add(new_tokens);
        if most_tokens > self.limits.sequence_tokens {
            return Err(Refusal::TooLong { tokens: most_tokens, most: self.limits.sequence_tokens });
        }
        if self.waiting.len() + count > self.limits.waiting {
            return Err(Refusal::QueueFull { waiting: self.waiting.len() });
        }
        let mut ids = Vec::with_capacity(count);
        for _ in 0..count {
            let id = SequenceId(self.next);
            self.next += 1;
            let sequence = Sequence {
                tokens: prompt.to_vec(),
                guesses: Vec::new(),
                computed: 0,
                blocks: Vec::new(),
                contents: Vec::new(),
                most_tokens,
                own_from,
            };
            self.sequences.insert(id, sequence);
            self.waiting.insert(id);
            ids.push(id);
        }
        Ok(ids)
    }

    /// What the next pass computes; empty when there is nothing to do. It is computed before the next call.
    pub fn plan(&mut self) -> Vec<Share> {
        self.plan_guessing(|_, _, _| Vec::new())
    }

    /// The same, with guesses: `guess(id, tokens, most)` says what may follow a sequence's tokens. They are computed where
    /// blocks are free.
    pub fn plan_guessing(&mut self, guess: impl Fn(SequenceId, &[i64], usize) -> Vec<i64>) -> Vec<Share> {
        let mut room = self.limits.pass_tokens;
        let mut shares = Vec::new();
        let mut preempted = false;
        let mut next = self.running.first().copied();
        while let (Some(id), true) = (next, room > 0) {
            let sequence = &self.sequences[&id];
            let count = (sequence.tokens.len() - sequence.computed).min(room);
            while !self.reserve(id, count) {
                preempted = true;
                let youngest = *self.running.last().expect("the sequence itself runs");
                self.preempt(youngest);
                if youngest == id {
                    break;
                }
            }
            if count > 0 && self.running.contains(&id) {
                let guessed = self.guess(id, count, room - count, &guess);
                shares.push(self.share(id, count, guessed));
                room -= count + guessed;
            }
            next = self
                .running
                .range((std::ops::Bound::Excluded(id), std::ops::Bound::Unbounded))
                .next()
                .copied();
        }
        // What was just taken from the youngest is not given to one that is younger still.
        while let (Some(&id), true) = (self.waiting.first(), room > 0 && !preempted) {
            if self.running.len() >= self.limits.running {
                break;
            }
            let Some(count) = self.admit(id, room) else { break };
            shares.push(self.share(id, count, 0));
            room -= count;
        }
        shares
    }

    fn share(&self, id: SequenceId, known: usize, guessed: usize) -> Share {
        let sequence = &self.sequences[&id];
        let first = sequence.computed;
        let chooses = first + known == sequence.tokens.len();
        Share { id, first, count: known + guessed, guessed, chooses }
    }

    /// Guesses behind the last known token, where a pass that computes `count` tokens reaches it; says how many.
    fn guess(
        &mut self,
        id: SequenceId,
        count: usize,
        room: usize,
        guess: impl Fn(SequenceId, &[i64], usize) -> Vec<i64>,
    ) -> usize {
        let sequence = self.sequences.get_mut(&id).expect("who runs has not ended");
        sequence.guesses.clear();
        // The token after the last guess must have a place too.
        let most = room.min(sequence.most_tokens.saturating_sub(sequence.tokens.len() + 1));
        if sequence.computed + count < sequence.tokens.len() || most == 0 {
            return 0;
        }
        let mut guesses = guess(id, &sequence.tokens, most);
        guesses.truncate(most);
        let guessed = guesses.len();
        if !self.reserve(id, count + guessed) {
            return 0;
        }
        self.sequences.get_mut(&id).expect("who runs has not ended").guesses = guesses;
        guessed
    }

    /// Takes the blocks that `count` more tokens need, or none of them.
    fn reserve(&mut self, id: SequenceId, count: usize) -> bool {
        let sequence = self.sequences.get_mut(&id).expect("who runs has not ended");
        let wanted = (sequence.computed + count).div_ceil(BLOCK_TOKENS);
        let missing = wanted.saturating_sub(sequence.blocks.len());
        if missing > self.pool.available() {
            return false;
        }
        let pool = &mut self.pool;
        sequence.blocks.extend((0..missing).map_while(|_| pool.take()));
        true
    }

    /// Lets a waiting sequence begin with what is there of it already. Returns how many tokens it computes.
    fn admit(&mut self, id: SequenceId, room: usize) -> Option<usize> {
        let sequence = self.sequences.get_mut(&id)?;
        // At least one token is computed: nothing else says what comes next.
        let most = if self.shares { sequence.own_from } else { 0 };
        let sharable = (sequence.tokens.len() - 1).min(most) / BLOCK_TOKENS;
        let mut found = 0;
        let mut taken = 0;
        while found < sharable {
            let content = sequence.content(found);
            let Some(idle) = self.pool.contains(&content) else { break };
            taken += usize::from(idle);
            found += 1;
        }
        let computed = found * BLOCK_TOKENS;
        let count = (sequence.tokens.len() - computed).min(room);
        let missing = (computed + count).div_ceil(BLOCK_TOKENS) - found;
        if taken + missing > self.pool.available() {
            return None;
        }
        for block in 0..found {
            let content = sequence.content(block);
            sequence.blocks.extend(self.pool.share(&content));
        }
        sequence.computed = computed;
        self.counters.shared_tokens += computed as u64;
        self.waiting.remove(&id);
        self.running.insert(id);
        let reserved = self.reserve(id, count);
        debug_assert!(reserved, "it was counted that there are enough");
        Some(count)
    }

    fn preempt(&mut self, id: SequenceId) {
        self.running.remove(&id);
        self.waiting.insert(id);
        self.counters.preemptions += 1;
        self.give_blocks_back(id);
        let sequence = self.sequences.get_mut(&id).expect("who runs has not ended");
        sequence.guesses.clear();
        sequence.computed = 0;
    }

    /// The last blocks go first, so that beginnings, which others may share, stay longest.
    fn give_blocks_back(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        for block in std::mem::take(&mut sequence.blocks).into_iter().rev() {
            self.pool.give_back(block);
        }
    }

    /// Notes that a share was computed.
    pub fn computed(&mut self, share: &Share) {
        let Some(sequence) = self.sequences.get_mut(&share.id) else { return };
        sequence.computed = share.first + share.count - share.guessed;
        for block in share.first / BLOCK_TOKENS..sequence.computed / BLOCK_TOKENS {
            let content = sequence.content(block);
            self.pool.publish(sequence.blocks[block], content);
        }
    }

    /// Adds the token that was chosen for a sequence. Returns whether it was the next guess: then it is computed too, and what
    /// the pass says behind it holds. Otherwise the remaining guesses are forgotten.
    pub fn push(&mut self, id: SequenceId, token: i64) -> bool {
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        sequence.tokens.push(token);
        if sequence.guesses.first() != Some(&token) {
            sequence.guesses.clear();
            return false;
        }
        sequence.guesses.remove(0);
        sequence.computed += 1;
        if sequence.computed.is_multiple_of(BLOCK_TOKENS) {
            let block = sequence.computed / BLOCK_TOKENS - 1;
            let content = sequence.content(block);
            self.pool.publish(sequence.blocks[block], content);
        }
        true
    }

    /// Ends a sequence, finished or not; its blocks are free again.
    pub fn end(&mut self, id: SequenceId) {
        self.give_blocks_back(id);
        self.sequences.remove(&id);
        self.running.remove(&id);
        self.waiting.remove(&id);
    }
}
