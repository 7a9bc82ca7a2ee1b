//! What the tests of this crate share: a seeded generator, a plain reference, and a random script of operations.

pub(crate) mod script;

/// A small seeded generator (SplitMix64), so that every rank draws the same script.
#[derive(Clone)]
pub(crate) struct Draw(pub u64);

impl Draw {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }
}

/// Runs `body` on every rank of a job of threads and fails when any of them panics.
pub(crate) fn on_threads(size: usize, body: impl Fn(ferrospeed_comm::World) + Send + Sync) {
    let worlds = ferrospeed_comm::World::threads(size);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds.into_iter().map(|world| scope.spawn(|| body(world))).collect();
        for rank in ranks {
            if let Err(panic) = rank.join() {
                std::panic::resume_unwind(panic);
            }
        }
    });
}
