//! Guesses by a smaller model.
//!
//! It has a cache of its own and knows, for every text, which tokens that holds. What of a guess was not kept is forgotten when
//! the text has gone on otherwise. All texts are guessed for together: a pass over what each has new, then one for every further
//! token. Where its cache is full, texts that are not guessed for now give their blocks up, and then some get no guess.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use ferrospeed_tensor::{Device, PagedRows, PagedSequence};

use crate::core::pool::{BLOCK_TOKENS, BlockId, BlockPool};
use crate::core::schedule::SequenceId;
use crate::error::{Result, ServeError};
use crate::model::{ModelFacts, OpenOptions, open};
use crate::runner::Runner;

/// Rows of a pass, at most.
const PASS_ROWS: usize = 512;

/// A smaller model beside the one that is served.
pub struct Draft {
    runner: Runner,
    pool: BlockPool,
    longest: usize,
    guesses: usize,
    held: HashMap<SequenceId, Held>,
}

/// What its cache knows of a text.
#[derive(Debug, Default)]
struct Held {
    tokens: Vec<i64>,
    blocks: Vec<BlockId>,
}

/// A text that is being guessed for.
struct Growing {
    id: SequenceId,
    /// Known tokens and guesses.
    tokens: Vec<i64>,
    known: usize,
}

impl Draft {
    /// Opens the model; it guesses up to `guesses` tokens for texts of the model that `facts` describes.
    pub fn open(
        path: &Path,
        options: &OpenOptions,
        device: &Device,
        facts: &ModelFacts,
        guesses: usize,
    ) -> Result<Draft> {
        let (own, runner, blocks) = open(path, options, device)?;
        if own.vocabulary != facts.vocabulary {
            let (draft, model) = (own.vocabulary, facts.vocabulary);
            return Err(ServeError::OtherVocabulary { path: path.to_path_buf(), draft, model });
        }
        let pool = BlockPool::new(blocks);
        Ok(Draft { runner, pool, longest: own.longest, guesses, held: HashMap::new() })
    }

    /// Forgets a text that has ended.
    pub(crate) fn forget(&mut self, id: SequenceId) {
        let held = self.held.remove(&id).unwrap_or_default();
        held.blocks.into_iter().for_each(|block| self.pool.give_back(block));
    }

    /// What may follow each of these texts.
    pub(crate) fn guess(&mut self, texts: &[(SequenceId, &[i64])]) -> Result<HashMap<SequenceId, Vec<i64>>> {
        let mut growing = Vec::new();
        for &(id, tokens) in texts {
            let room = tokens.len() + self.guesses;
            if !tokens.is_empty() && room <= self.longest && self.reserve(id, tokens, room, texts) {
                growing.push(Growing { id, tokens: tokens.to_vec(), known: tokens.len() });
            }
        }
        for _ in 0..self.guesses {
            self.grow(&mut growing)?;
        }
        let guesses = growing.into_iter().map(|mut text| (text.id, text.tokens.split_off(text.known)));
        Ok(guesses.collect())
    }

    /// Keeps what its cache knows of a text's beginning, and makes room for all of it.
    fn reserve(
        &mut self,
        id: SequenceId,
        tokens: &[i64],
        room: usize,
        wanted: &[(SequenceId, &[i64])],
    ) -> bool {
        let held = self.held.entry(id).or_default();
        let same = held.tokens.iter().zip(tokens).take_while(|(held, token)| held == token).count();
        // The logits behind the last token have to be computed.
        held.tokens.truncate(same.min(tokens.len() - 1));
        let needed = room.div_ceil(BLOCK_TOKENS).saturating_sub(held.blocks.len());
        while self.pool.available() < needed {
            let idle = self.held.keys().find(|&&other| wanted.iter().all(|(id, _)| *id != other)).copied();
            match idle {
                Some(other) => self.forget(other),
                None => return false,
            }
        }
        if let Some(held) = self.held.get_mut(&id) {
            held.blocks.extend((0..needed).map_while(|_| self.pool.take()));
        }
        true
    }

    /// One more token for every text, in as few passes as it takes.
    fn grow(&mut self, texts: &mut [Growing]) -> Result<()> {
        let mut begin = 0;
        while begin < texts.len() {
            let (mut rows, mut ids, mut last) = (PagedRows::default(), Vec::new(), Vec::new());
            let mut end = begin;
            while let Some(text) = texts.get(end) {
                let Some(held) = self.held.get_mut(&text.id) else { return Ok(()) };
                let first = held.tokens.len();
                let left = PASS_ROWS - ids.len();
                let count = (text.tokens.len() - first).min(left);
                if count == 0 {
                    break;
                }
                let new = &text.tokens[first..first + count];
                ids.extend_from_slice(new);
                held.tokens.extend_from_slice(new);
                let blocks = held.blocks.iter().map(|block| block.0).collect();
                rows.sequences.push(PagedSequence { first, count, blocks });
                if held.tokens.len() < text.tokens.len() {
                    break;
                }
                last.push(ids.len() as i64 - 1);
                end += 1;
            }
            let next = self.runner.likeliest(&ids, &Arc::new(rows), &last)?;
            for (text, token) in texts[begin..end].iter_mut().zip(next) {
                text.tokens.push(token);
            }
            begin = end;
        }
        Ok(())
    }
}
