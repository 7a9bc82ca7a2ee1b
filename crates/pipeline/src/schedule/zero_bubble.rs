//! Zero-bubble schedules: backward is cut into the gradient of the input, for which the stage before waits, and the
//! gradients of the weights, for which nobody waits before the optimizer. The second half is work for idle moments.

use super::{Instruction, Item, Kind, Schedule};

/// ZB-H1: stage `s` lets the weights' gradients lie `s` micro-batches behind, so that every stage holds `p` micro-batches
/// at most, as the first one of 1F1B does.
pub(super) fn h1(stages: usize, micro_batches: usize) -> Schedule {
    let order = |stage: usize| {
        let mut order = Order::default();
        let mut chunk = Chunk::new(stage, micro_batches);
        (0..stages - 1 - stage).for_each(|_| chunk.forward(&mut order));
        for backward in 0..micro_batches {
            chunk.forward(&mut order);
            chunk.backward(&mut order);
            if backward >= stage {
                chunk.weights(&mut order);
            }
        }
        chunk.finish(&mut order);
        order
    };
    let compute = (0..stages).map(order).collect();
    let kind = Kind::ZeroBubbleH1;
    Schedule::from_compute(kind, micro_batches, kind.placement(stages), compute)
}

/// ZB-V: stage `s` has the chunks `s` and `2p - 1 - s`, so the last chunk is on the first stage, and the loss's gradient
/// reaches every stage soon. Every stage holds `2p` chunks' micro-batches at most: as much as `p` of 1F1B's.
pub(super) fn v(stages: usize, micro_batches: usize) -> Schedule {
    let order = |stage: usize| {
        let mut order = Order::default();
        let mut down = Chunk::new(stage, micro_batches);
        let mut up = Chunk::new(2 * stages - 1 - stage, micro_batches);
        let from_turn = stages - stage;
        (0..2 * from_turn - 1).for_each(|_| down.forward(&mut order));
        for _ in 0..stage {
            up.forward(&mut order);
            down.forward(&mut order);
        }
        for _ in 0..from_turn {
            up.forward(&mut order);
            up.backward(&mut order);
            up.weights(&mut order);
        }
        while up.forwards < down.forwards || down.forwards < micro_batches {
            down.forward(&mut order);
            down.backward(&mut order);
            down.weights(&mut order);
            up.forward(&mut order);
            up.backward(&mut order);
            up.weights(&mut order);
        }
        for _ in 0..stage {
            down.backward(&mut order);
            up.backward(&mut order);
        }
        for _ in 0..from_turn {
            down.backward(&mut order);
            down.weights(&mut order);
        }
        up.finish(&mut order);
        down.finish(&mut order);
        order
    };
    let compute = (0..stages).map(order).collect();
    let kind = Kind::ZeroBubbleV;
    Schedule::from_compute(kind, micro_batches, kind.placement(stages), compute)
}

type Order = Vec<Instruction>;

/// How far a chunk is. Each call appends the next of its kind, if one is left that may run.
struct Chunk {
    chunk: usize,
    micro_batches: usize,
    forwards: usize,
    backwards: usize,
    weights: usize,
}

impl Chunk {
    fn new(chunk: usize, micro_batches: usize) -> Chunk {
        Chunk { chunk, micro_batches, forwards: 0, backwards: 0, weights: 0 }
    }

    fn item(&self, micro: usize) -> Item {
        Item { chunk: self.chunk, micro }
    }

    fn forward(&mut self, order: &mut Order) {
        if self.forwards < self.micro_batches {
            order.push(Instruction::Forward(self.item(self.forwards)));
            self.forwards += 1;
        }
    }

    fn backward(&mut self, order: &mut Order) {
        if self.backwards < self.forwards {
            order.push(Instruction::BackwardInput(self.item(self.backwards)));
            self.backwards += 1;
        }
    }

    fn weights(&mut self, order: &mut Order) {
        if self.weights < self.backwards {
            order.push(Instruction::BackwardWeight(self.item(self.weights)));
            self.weights += 1;
        }
    }

    fn finish(&mut self, order: &mut Order) {
        while self.weights < self.micro_batches {
            if self.backwards < self.micro_batches && self.backwards == self.weights {
                self.backward(order);
            }
            self.weights(order);
        }
    }
}
