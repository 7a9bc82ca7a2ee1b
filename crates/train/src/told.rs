//! What ranks tell each other at the end of a step: one exchange, whatever is observed.
//!
//! Everybody needs the mean loss and whether somebody was asked to stop; whoever watches the run wants to know what each rank
//! did and held. All of it is a few numbers per rank, so one gather carries them.

use std::collections::BTreeMap;

use ferrospeed_comm::Group;
use ferrospeed_engine::StepTimes;
use ferrospeed_observe::RankTimes;
use ferrospeed_tensor::Category;
use ferrospeed_tensor::memory::MemoryUsage;

use crate::error::Result;

/// The loss and its weight, two requests, four times, and bytes by category and together.
const NUMBERS: usize = 4 + 4 + Category::ALL.len() + 1;
/// Memory of ranks is told again where it is another by more than this share.
const CHANGED_SHARE: f64 = 0.01;

/// What one rank says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Own {
    /// Of its micro-batches that have something to predict.
    pub(crate) loss: f32,
    /// How many of all its micro-batches those are.
    pub(crate) share: f32,
    /// Whether to finish early, and whether to leave at once.
    pub(crate) requests: [bool; 2],
    pub(crate) times: StepTimes,
    pub(crate) memory: MemoryUsage,
}

/// What all ranks said.
#[derive(Debug, Clone)]
pub(crate) struct Told {
    /// The mean over micro-batches that have something to predict, added up in the order of ranks; none where none has.
    pub(crate) loss: Option<f32>,
    /// Whether any rank asked for it.
    pub(crate) requests: [bool; 2],
    /// In the order of ranks; none where there is one.
    pub(crate) times: Vec<RankTimes>,
    /// The same: peaks within the step.
    pub(crate) memory: Vec<RankMemory>,
}

/// Bytes by category, and under `total` of all together.
pub(crate) type RankMemory = BTreeMap<String, u64>;

/// The peaks of a device.
pub(crate) fn peaks(memory: &MemoryUsage) -> RankMemory {
    by_name(Category::ALL.map(|category| memory.peak(category) as u64), memory.peak_total() as u64)
}

fn by_name(categories: [u64; Category::ALL.len()], total: u64) -> RankMemory {
    let named = Category::ALL.iter().map(|category| category.name().to_owned()).zip(categories);
    named.chain([("total".to_owned(), total)]).collect()
}

/// All ranks call it together.
pub(crate) fn tell(group: &Group, own: Own) -> Result<Told> {
    let ms = |time: std::time::Duration| time.as_secs_f64() * 1e3;
    let Own { loss, share, requests: [finish, leave], times, memory } = own;
    let mut numbers =
        vec![loss.into(), share.into(), f64::from(u8::from(finish)), f64::from(u8::from(leave))];
    numbers.extend([times.forward, times.backward_inner, times.backward_allreduce, times.step].map(ms));
    // Whole numbers up to 2⁵³ are themselves.
    numbers.extend(Category::ALL.map(|category| memory.peak(category) as f64));
    numbers.push(memory.peak_total() as f64);
    let mut all = vec![0.0; NUMBERS * group.size()];
    group.all_gather(&numbers, &mut all)?;
    Ok(of_ranks(&all))
}

fn of_ranks(all: &[f64]) -> Told {
    let ranks: Vec<&[f64]> = all.chunks_exact(NUMBERS).collect();
    // Where every micro-batch counts, shares are 1 and leave the bits of losses as they are.
    let weighted = ranks.iter().map(|rank| [rank[0] as f32 * rank[1] as f32, rank[1] as f32]);
    let [sum, shares] = weighted.fold([0.0; 2], |sums, rank| [sums[0] + rank[0], sums[1] + rank[1]]);
    let times = |rank: &&[f64]| RankTimes {
        forward_ms: rank[4],
        backward_ms: rank[5],
        wait_ms: rank[6],
        optimizer_ms: rank[7],
    };
    let memory = |rank: &&[f64]| {
        by_name(std::array::from_fn(|category| rank[8 + category] as u64), rank[NUMBERS - 1] as u64)
    };
    let several = if ranks.len() > 1 { &ranks[..] } else { &[] };
    Told {
        loss: (shares > 0.0).then(|| sum / shares),
        requests: [2, 3].map(|place| ranks.iter().any(|rank| rank[place] > 0.0)),
        times: several.iter().map(times).collect(),
        memory: several.iter().map(memory).collect(),
    }
}

/// Keeps what ranks held out of a log that has it already.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    written: Vec<RankMemory>,
}

impl Changes {
    /// What is new: everything, or nothing.
    pub(crate) fn of(&mut self, memory: Vec<RankMemory>) -> Vec<RankMemory> {
        let bytes = |rank: &RankMemory, name: &str| rank.get(name).map_or(0.0, |&bytes| bytes as f64);
        let is_other = |(now, before): (&RankMemory, &RankMemory)| {
            now.keys().any(|name| {
                let (now, before) = (bytes(now, name), bytes(before, name));
                (now - before).abs() > CHANGED_SHARE * before
            })
        };
        let is_known = self.written.len() == memory.len();
        if is_known && !memory.iter().zip(&self.written).any(is_other) {
            return Vec::new();
        }
        self.written.clone_from(&memory);
        memory
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(loss: f64, leave: f64, wait: f64) -> Vec<f64> {
        let mut numbers = vec![loss, 1.0, 0.0, leave, 1.0, 2.0, wait, 4.0];
        numbers.extend([10.0, 20.0, 30.0, 40.0, 50.0, 120.0]);
        numbers
    }

    #[test]
    fn a_step_is_told_once_for_all_who_want_to_know() {
        let told = of_ranks(&[said(1.5, 0.0, 0.0), said(2.0, 1.0, 3.0)].concat());
        assert_eq!((told.loss, told.requests), (Some(1.75), [false, true]));
        assert_eq!(told.times[1].wait_ms, 3.0);
        assert_eq!((told.memory[0]["parameters"], told.memory[0]["total"]), (10, 120));
        let alone = of_ranks(&said(f64::NAN, 0.0, 0.0));
        assert!(alone.loss.is_some_and(f32::is_nan) && alone.times.is_empty() && alone.memory.is_empty());
    }

    #[test]
    fn micro_batches_without_anything_to_predict_do_not_count_in_the_mean() {
        let sharing = |loss: f64, share: f64| {
            let mut numbers = said(loss, 0.0, 0.0);
            numbers[1] = share;
            numbers
        };
        // A rank with both of its micro-batches, one with half of them, and one with none.
        let told = of_ranks(&[sharing(3.0, 1.0), sharing(6.0, 0.5), sharing(0.0, 0.0)].concat());
        assert_eq!(told.loss, Some(4.0));
        assert_eq!(of_ranks(&[sharing(0.0, 0.0), sharing(0.0, 0.0)].concat()).loss, None);
    }

    #[test]
    fn memory_that_stays_as_it_is_is_written_once() {
        let memory = |bytes: u64| vec![by_name([bytes, 0, 0, 0, 0], bytes); 2];
        let mut changes = Changes::default();
        assert_eq!(changes.of(memory(1000)).len(), 2);
        assert!(changes.of(memory(1001)).is_empty());
        assert_eq!(changes.of(memory(1100)).len(), 2);
        assert!(changes.of(memory(1100)).is_empty());
    }
}
