//! A random sequence of operations over random groups, checked against a plain single-process reference.
//!
//! Every rank draws the same script from the seed and knows the inputs of all ranks, so each checks its own results.

use ferrospeed_comm::{DType, Group, ReduceOp, Region, Work, World};
use half::{bf16, f16};

use super::Draw;

/// Runs `operations` random operations and panics on the first wrong byte.
pub(crate) fn run(world: &World, seed: u64, operations: usize) {
    let mut draw = Draw(seed);
    let groups = make_groups(world, &mut draw);
    let registered = world.allocate(1 << 20).expect("registered memory");
    for index in 0..operations {
        let step_seed = draw.next();
        let (ranks, group) = &groups[draw.below(groups.len())];
        let Some(group) = group else { continue };
        let mut step = Step { draw: Draw(step_seed), group, ranks, memory: Memory::Plain };
        if step.draw.below(2) == 0 {
            step.memory = Memory::Registered(registered.region());
        }
        let what = step.draw.below(11);
        step.run(what, &format!("seed {seed}, operation {index}, kind {what}, group {ranks:?}"));
    }
    world.group().barrier().expect("the last barrier");
}

fn make_groups(world: &World, draw: &mut Draw) -> Vec<(Vec<usize>, Option<Group>)> {
    let mut groups = vec![((0..world.size()).collect(), Some(world.group()))];
    for _ in 0..3 {
        let mut ranks: Vec<usize> = (0..world.size()).collect();
        for index in (1..ranks.len()).rev() {
            ranks.swap(index, draw.below(index + 1));
        }
        ranks.truncate(1 + draw.below(world.size()));
        let group = world.new_group(&ranks).expect("a group");
        groups.push((ranks, group));
    }
    groups
}

enum Memory {
    Plain,
    Registered(Region),
}

struct Step<'a> {
    draw: Draw,
    group: &'a Group,
    ranks: &'a [usize],
    memory: Memory,
}

/// The input of one rank: finite floats of mixed size, any integers, proper booleans.
fn input(seed: u64, rank: usize, dtype: DType, elements: usize) -> Vec<u8> {
    let mut draw = Draw(seed ^ (rank as u64 + 1).wrapping_mul(0x1234_5678_9abc_def1));
    let mut bytes = Vec::with_capacity(elements * dtype.size());
    for _ in 0..elements {
        let bits = draw.next();
        let float = ((bits % 2001) as f32 - 1000.0) * [1.0, 1e-3, 37.5, 0.125][(bits >> 32) as usize % 4];
        match dtype {
            DType::F32 => bytes.extend(float.to_le_bytes()),
            DType::F64 => bytes.extend((f64::from(float) / 3.0).to_le_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f32(float).to_le_bytes()),
            DType::F16 => bytes.extend(f16::from_f32(float / 64.0).to_le_bytes()),
            DType::Bool => bytes.push((bits & 1) as u8),
            _ => bytes.extend(&bits.to_le_bytes()[..dtype.size()]),
        }
    }
    bytes
}

/// The reduction as one would write it on paper, element by element.
pub(crate) fn reduce(dtype: DType, op: ReduceOp, inputs: &[Vec<u8>]) -> Vec<u8> {
    let count = inputs.len();
    macro_rules! floats {
        ($type:ty, $wide:ty, $widen:expr, $narrow:expr) => {{
            let element = |rank: usize, at: usize| -> $wide {
                let size = size_of::<$type>();
                $widen(<$type>::from_le_bytes(inputs[rank][at * size..(at + 1) * size].try_into().unwrap()))
            };
            let mut out = Vec::new();
            for at in 0..inputs[0].len() / size_of::<$type>() {
                let mut sum = element(0, at);
                for rank in 1..count {
                    let next = element(rank, at);
                    sum = match op {
                        ReduceOp::Sum | ReduceOp::Avg => sum + next,
                        ReduceOp::Product => sum * next,
                        ReduceOp::Min => sum.min(next),
                        ReduceOp::Max => sum.max(next),
                        _ => unreachable!(),
                    };
                }
                if op == ReduceOp::Avg {
                    sum /= count as $wide;
                }
                let narrow: $type = $narrow(sum);
                out.extend(narrow.to_le_bytes());
            }
            out
        }};
    }
    macro_rules! integers {
        ($type:ty) => {{
            let size = size_of::<$type>();
            let element = |rank: usize, at: usize| {
                <$type>::from_le_bytes(inputs[rank][at * size..(at + 1) * size].try_into().unwrap())
            };
            let mut out = Vec::new();
            for at in 0..inputs[0].len() / size {
                let folded = (1..count).fold(element(0, at), |sum, rank| {
                    let next = element(rank, at);
                    match op {
                        ReduceOp::Sum => sum.wrapping_add(next),
                        ReduceOp::Product => sum.wrapping_mul(next),
                        ReduceOp::Min => sum.min(next),
                        ReduceOp::Max => sum.max(next),
                        ReduceOp::BitAnd => sum & next,
                        ReduceOp::BitOr => sum | next,
                        ReduceOp::Avg => unreachable!(),
                    }
                });
                out.extend(folded.to_le_bytes());
            }
            out
        }};
    }
    match dtype {
        DType::F32 => floats!(f32, f32, |x| x, |x| x),
        DType::F64 => floats!(f64, f64, |x| x, |x| x),
        DType::BF16 => floats!(bf16, f32, bf16::to_f32, bf16::from_f32),
        DType::F16 => floats!(f16, f32, f16::to_f32, f16::from_f32),
        DType::I8 => integers!(i8),
        DType::I16 => integers!(i16),
        DType::I32 => integers!(i32),
        DType::I64 => integers!(i64),
        DType::U8 => integers!(u8),
        DType::Bool => {
            let any = matches!(op, ReduceOp::Sum | ReduceOp::Max | ReduceOp::BitOr);
            let at = |at: usize| {
                let mut values = inputs.iter().map(|input| input[at] != 0);
                u8::from(if any { values.any(|value| value) } else { values.all(|value| value) })
            };
            (0..inputs[0].len()).map(at).collect()
        }
    }
}

impl Step<'_> {
    fn region(&self, at: &mut usize, bytes: &[u8]) -> Region {
        let region = match &self.memory {
            Memory::Registered(all) if *at + bytes.len() <= all.len() => {
                let region = all.slice(*at..*at + bytes.len());
                *at = (*at + bytes.len()).next_multiple_of(64).min(all.len());
                region
            }
            _ => Region::zeroed(bytes.len()),
        };
        // SAFETY: no operation is in flight on it, and this rank alone uses it.
        unsafe { region.as_mut_slice::<u8>() }.copy_from_slice(bytes);
        region
    }

    fn dtype_and_op(&mut self) -> (DType, ReduceOp) {
        let dtype = self.draw.pick(&DType::ALL);
        let fitting: Vec<ReduceOp> = ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)).collect();
        (dtype, self.draw.pick(&fitting))
    }

    fn elements(&mut self) -> usize {
        let choices = [0, 1, 7, 100, 3000, 20_000];
        self.draw.pick(&choices) + self.draw.below(13)
    }

    fn run(&mut self, what: usize, context: &str) {
        let (size, me) = (self.ranks.len(), self.group.rank());
        let (dtype, op) = self.dtype_and_op();
        let (elements, root, seed) = (self.elements(), self.draw.below(size), self.draw.next());
        let unit = dtype.size();
        let everyones = |count: &dyn Fn(usize) -> usize| -> Vec<Vec<u8>> {
            (0..size).map(|rank| input(seed, rank, dtype, count(rank))).collect()
        };
        let check = |region: &Region, expected: &[u8]| {
            // SAFETY: the operation is done.
            let actual = unsafe { region.as_slice::<u8>() };
            assert!(actual == expected, "{context}: {dtype} {op} ×{elements}: wrong result on rank {me}");
        };
        let done = |work: Work| work.wait().unwrap_or_else(|error| panic!("{context}: {error}"));
        let mut at = 0;
        match what {
            0 => {
                let inputs = everyones(&|_| elements);
                let data = self.region(&mut at, &inputs[me]);
                done(self.group.all_reduce_async(&data, dtype, op));
                check(&data, &reduce(dtype, op, &inputs));
            }
            1 => {
                let inputs = everyones(&|_| elements);
                let data = self.region(&mut at, &inputs[me]);
                done(self.group.reduce_async(&data, dtype, op, root));
                let expected = if me == root { reduce(dtype, op, &inputs) } else { inputs[me].clone() };
                check(&data, &expected);
            }
            2 => {
                let inputs = everyones(&|_| elements * size);
                let data = self.region(&mut at, &inputs[me]);
                let part = elements * unit;
                let output = if self.draw.below(2) == 0 {
                    data.slice(me * part..(me + 1) * part)
                } else {
                    self.region(&mut at, &vec![0; part])
                };
                done(self.group.reduce_scatter_async(&data, &output, dtype, op));
                check(&output, &reduce(dtype, op, &inputs)[me * part..(me + 1) * part]);
            }
            3 => {
                let inputs = everyones(&|_| elements);
                let output = self.region(&mut at, &vec![0; elements * unit * size]);
                let part = elements * unit;
                let own = if self.draw.below(2) == 0 {
                    let own = output.slice(me * part..(me + 1) * part);
                    // SAFETY: nothing is in flight.
                    unsafe { own.as_mut_slice::<u8>() }.copy_from_slice(&inputs[me]);
                    own
                } else {
                    self.region(&mut at, &inputs[me])
                };
                done(self.group.all_gather_async(&own, &output, dtype));
                check(&output, &inputs.concat());
            }
            4 => {
                let counts: Vec<usize> = (0..size).map(|_| self.draw.below(elements + 2)).collect();
                let inputs = everyones(&|rank| counts[rank]);
                let own = self.region(&mut at, &inputs[me]);
                let output = self.region(&mut at, &vec![0; counts.iter().sum::<usize>() * unit]);
                done(self.group.all_gather_unequal_async(&own, &output, &counts, dtype));
                check(&output, &inputs.concat());
                let total: usize = counts.iter().sum();
                let inputs = everyones(&|_| total);
                let data = self.region(&mut at, &inputs[me]);
                let start: usize = counts[..me].iter().sum::<usize>() * unit;
                let mine = start..start + counts[me] * unit;
                let output = if self.draw.below(2) == 0 {
                    data.slice(mine.clone())
                } else {
                    self.region(&mut at, &vec![0; mine.len()])
                };
                done(self.group.reduce_scatter_unequal_async(&data, &output, &counts, dtype, op));
                check(&output, &reduce(dtype, op, &inputs)[mine]);
            }
            5 => {
                let inputs = everyones(&|_| elements);
                let data = self.region(&mut at, &inputs[me]);
                done(self.group.broadcast_async(&data, dtype, root));
                check(&data, &inputs[root]);
            }
            6 => {
                let inputs = everyones(&|_| elements * size);
                let part = elements * unit;
                let data = self.region(&mut at, &inputs[me]);
                let output = self.region(&mut at, &vec![0; part]);
                done(self.group.scatter_async((me == root).then_some(&data), &output, dtype, root));
                check(&output, &inputs[root][me * part..(me + 1) * part]);
                let own = self.region(&mut at, &inputs[me][..part]);
                let all = self.region(&mut at, &vec![0; part * size]);
                done(self.group.gather_async(&own, (me == root).then_some(&all), dtype, root));
                if me == root {
                    check(
                        &all,
                        &inputs.iter().flat_map(|input| &input[..part]).copied().collect::<Vec<u8>>(),
                    );
                }
            }
            7 => {
                let inputs = everyones(&|_| elements * size);
                let part = elements * unit;
                let data = self.region(&mut at, &inputs[me]);
                let output = self.region(&mut at, &vec![0; part * size]);
                done(self.group.all_to_all_async(&data, &output, dtype));
                let mine = inputs.iter().flat_map(|input| &input[me * part..(me + 1) * part]);
                check(&output, &mine.copied().collect::<Vec<u8>>());
            }
            8 => {
                let sends: Vec<Vec<usize>> = (0..size)
                    .map(|_| (0..size).map(|_| self.draw.below(elements / 4 + 2)).collect())
                    .collect();
                let inputs = everyones(&|rank| sends[rank].iter().sum());
                let receives: Vec<usize> = sends.iter().map(|row| row[me]).collect();
                let data = self.region(&mut at, &inputs[me]);
                let output = self.region(&mut at, &vec![0; receives.iter().sum::<usize>() * unit]);
                done(self.group.all_to_all_unequal_async(&data, &output, &sends[me], &receives, dtype));
                let mut expected = Vec::new();
                for (row, input) in sends.iter().zip(&inputs) {
                    let start = row[..me].iter().sum::<usize>() * unit;
                    expected.extend(&input[start..start + row[me] * unit]);
                }
                check(&output, &expected);
            }
            9 => {
                let lists: Vec<(usize, u64)> =
                    (0..1 + self.draw.below(40)).map(|_| (self.draw.below(500), self.draw.next())).collect();
                let mut regions = Vec::new();
                for (count, seed) in &lists {
                    regions.push(self.region(&mut at, &input(*seed, me, dtype, *count)));
                }
                done(self.group.all_reduce_coalesced(&regions, dtype, op));
                for ((count, seed), region) in lists.iter().zip(&regions) {
                    let inputs: Vec<_> = (0..size).map(|rank| input(*seed, rank, dtype, *count)).collect();
                    check(region, &reduce(dtype, op, &inputs));
                }
            }
            _ => {
                // Everybody sends to everybody, two tags, asked for in the opposite order.
                let inputs = everyones(&|_| elements);
                let data = self.region(&mut at, &inputs[me]);
                let mut works = Vec::new();
                let mut received = Vec::new();
                for peer in (0..size).filter(|peer| *peer != me) {
                    works.push(self.group.send_async(&data, dtype, peer, 7));
                    works.push(self.group.send_async(&data, dtype, peer, 9));
                    for tag in [9, 7] {
                        let region = self.region(&mut at, &vec![0; elements * unit]);
                        works.push(self.group.recv_async(&region, dtype, peer, tag));
                        received.push((peer, region));
                    }
                }
                for work in works {
                    done(work);
                }
                for (peer, region) in received {
                    check(&region, &inputs[peer]);
                }
            }
        }
    }
}
