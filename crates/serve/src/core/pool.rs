//! Blocks of the key/value cache: who holds them, what they contain, which one is given up next.
//!
//! A block holds [`BLOCK_TOKENS`] tokens of one sequence, in all layers. A full block is known by the hash of its tokens and
//! of all before them, so that a sequence with the same beginning shares it instead of computing it again. A block nobody
//! holds keeps its content until its place is needed; the one that was given back first goes first. (Kwon et al.:
//! "Efficient memory management for large language model serving with PagedAttention", 2023.)

use std::collections::{BTreeMap, HashMap};

use sha2::{Digest, Sha256};

/// Tokens of a block.
pub const BLOCK_TOKENS: usize = 16;

/// A block of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// What a full block contains: its tokens and all before them. A cryptographic hash, because whoever could make two
/// beginnings meet would read another client's answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ContentHash([u8; 32]);

impl ContentHash {
    /// The hash of a block of `tokens` behind blocks of hash `before`.
    pub fn of(before: Option<&ContentHash>, tokens: &[i64]) -> ContentHash {
        let mut hasher = Sha256::new();
        if let Some(before) = before {
            hasher.update(before.0);
        }
        for token in tokens {
            hasher.update(token.to_le_bytes());
        }
        ContentHash(hasher.finalize().into())
    }
}

#[derive(Debug, Clone, Default)]
struct Block {
    holders: u32,
    content: Option<ContentHash>,
    /// When it was given back; its key among the idle ones.
    idle_since: u64,
}

/// All blocks of a cache.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Without holders or content.
    free: Vec<BlockId>,
    /// Without holders, with content, the oldest first.
    idle: BTreeMap<u64, BlockId>,
    by_content: HashMap<ContentHash, BlockId>,
    clock: u64,
    evictions: u64,
}

impl BlockPool {
    /// A pool of `count` free blocks.
    pub fn new(count: u32) -> BlockPool {
        BlockPool {
            blocks: vec![Block::default(); count as usize],
            free: (0..count).rev().map(BlockId).collect(),
            idle: BTreeMap::new(),
            by_content: HashMap::new(),
            clock: 0,
            evictions: 0,
        }
    }

    /// How many blocks there are.
    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    /// How many can be taken.
    pub fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// How many are held.
    pub fn held(&self) -> usize {
        self.capacity() - self.available()
    }

    /// How many contents were given up for their place.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Takes a block for one holder; its content is anything. `None` when all are held.
    pub fn take(&mut self) -> Option<BlockId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let (_, id) = self.idle.pop_first()?;
                if let Some(content) = self.blocks[id.0 as usize].content.take() {
                    self.by_content.remove(&content);
                }
                self.evictions += 1;
                id
            }
        };
        self.blocks[id.0 as usize].holders = 1;
        Some(id)
    }

    /// The block with this content, with one more holder.
    pub fn share(&mut self, content: &ContentHash) -> Option<BlockId> {
        let id = *self.by_content.get(content)?;
        let block = &mut self.blocks[id.0 as usize];
        if block.holders == 0 {
            self.idle.remove(&block.idle_since);
        }
        block.holders += 1;
        Some(id)
    }

    /// Whether [`BlockPool::share`] would find it, and whether that takes one of the available blocks.
    pub fn contains(&self, content: &ContentHash) -> Option<bool> {
        self.by_content.get(content).map(|id| self.blocks[id.0 as usize].holders == 0)
    }

    /// Notes what a full block contains. Where another block contains the same, that one stays the shared one.
    pub fn publish(&mut self, id: BlockId, content: ContentHash) {
        if self.blocks[id.0 as usize].content.is_none() && !self.by_content.contains_key(&content) {
            self.blocks[id.0 as usize].content = Some(content);
            self.by_content.insert(content, id);
        }
    }

    /// Gives up one holder's claim.
    pub fn give_back(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        debug_assert!(block.holders > 0, "a block is given back as often as it was taken");
        block.holders = block.holders.saturating_sub(1);
        if block.holders > 0 {
            return;
        }
        if block.content.is_some() {
            block.idle_since = self.clock;
            self.idle.insert(self.clock, id);
            self.clock += 1;
        } else {
            self.free.push(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn content(number: i64) -> ContentHash {
        ContentHash::of(None, &[number])
    }

    #[test]
    fn a_block_returns_to_the_pool_when_its_last_holder_leaves() {
        let mut pool = BlockPool::new(2);
        let block = pool.take().unwrap();
        pool.publish(block, content(1));
        assert_eq!(pool.share(&content(1)), Some(block));
        pool.give_back(block);
        assert_eq!(pool.held(), 1, "one holder is left");
        pool.give_back(block);
        assert_eq!(pool.held(), 0);
        assert_eq!(pool.share(&content(1)), Some(block), "its content outlives its holders");
    }

    #[test]
    fn the_content_that_was_given_back_first_goes_first() {
        let mut pool = BlockPool::new(3);
        let blocks: Vec<BlockId> = (0..3).map(|_| pool.take().unwrap()).collect();
        assert_eq!(pool.take(), None);
        for (number, &block) in blocks.iter().enumerate() {
            pool.publish(block, content(number as i64));
        }
        for index in [1, 0, 2] {
            pool.give_back(blocks[index]);
        }
        let kept = pool.share(&content(0)).unwrap();
        assert_eq!(pool.take(), Some(blocks[1]), "the oldest that nobody holds");
        assert_eq!((pool.contains(&content(1)), pool.contains(&content(2))), (None, Some(true)));
        assert_eq!(pool.take(), Some(blocks[2]));
        assert_eq!((pool.take(), pool.evictions()), (None, 2));
        pool.give_back(kept);
    }

    #[test]
    fn the_same_tokens_behind_another_beginning_are_another_content() {
        let first = ContentHash::of(None, &[1, 2]);
        assert_ne!(ContentHash::of(Some(&first), &[3]), ContentHash::of(None, &[3]));
        assert_eq!(
            ContentHash::of(Some(&first), &[3]),
            ContentHash::of(Some(&ContentHash::of(None, &[1, 2])), &[3])
        );
    }

    #[test]
    fn a_content_that_is_there_twice_is_shared_from_one_place_and_both_blocks_come_back() {
        let mut pool = BlockPool::new(2);
        let (one, two) = (pool.take().unwrap(), pool.take().unwrap());
        pool.publish(one, content(7));
        pool.publish(two, content(7));
        assert_eq!(pool.share(&content(7)), Some(one));
        [one, one, two].into_iter().for_each(|block| pool.give_back(block));
        assert_eq!(pool.available(), 2);
    }
}
