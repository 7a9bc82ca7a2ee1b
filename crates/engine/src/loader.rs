//! Micro-batches of a data set for one rank: DeepSpeed's `deepspeed_io` and its repeating loader.
//!
//! Every epoch has an order of its own, the same on all ranks, and each rank takes its share of it. A place in it is one
//! number, the samples that all ranks have taken, so a loader goes on where a checkpoint says. Data by recipe does not
//! come through here: see the crate `ferrospeed-data`.

use ferrospeed_tensor::random::{RandomKey, stream_of_name};

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// Samples by number.
pub trait Dataset {
    /// One of them.
    type Sample;

    /// How many there are.
    fn len(&self) -> usize;

    /// Whether there are none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Sample `index`, which is below [`Dataset::len`].
    fn get(&self, index: usize) -> Self::Sample;
}

impl<T: Clone> Dataset for Vec<T> {
    type Sample = T;

    fn len(&self) -> usize {
        Vec::len(self)
    }

    fn get(&self, index: usize) -> T {
        self[index].clone()
    }
}

/// How a loader goes through a data set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoaderOptions {
    /// Samples of a micro-batch.
    pub batch: usize,
    /// Which rank takes them.
    pub rank: usize,
    /// Of how many.
    pub ranks: usize,
    /// Where the order of epochs starts; `None` keeps the order of the data set, as evaluations do.
    pub shuffle: Option<u64>,
    /// Whether a last micro-batch that is not full is left out.
    pub drop_last: bool,
}

/// One rank's micro-batches, epoch after epoch: an iterator ends with its epoch, and the next one starts the next.
///
/// Ranks take turns sample by sample. Where the samples do not divide among them, the first of the epoch are taken
/// again at its end, so that all ranks have equally many micro-batches.
#[derive(Debug, Clone)]
pub struct DataLoader<D> {
    dataset: D,
    options: LoaderOptions,
    epoch: u64,
    /// The micro-batch of the epoch that comes next.
    next: usize,
    order: Vec<usize>,
}

impl<D: Dataset> DataLoader<D> {
    /// A loader at the start of its first epoch.
    pub fn new(dataset: D, options: LoaderOptions) -> Result<DataLoader<D>> {
        let refuse = |why: String| Err(EngineError::Argument { what: "data loader", why });
        if options.batch == 0 || options.rank >= options.ranks {
            return refuse(format!(
                "a micro-batch of {} on rank {} of {}",
                options.batch, options.rank, options.ranks
            ));
        }
        let mut loader = DataLoader { dataset, options, epoch: 0, next: 0, order: Vec::new() };
        if loader.batches_per_epoch() == 0 {
            let why = format!(
                "{} samples are less than a micro-batch of {} on each of {} ranks",
                loader.dataset.len(),
                options.batch,
                options.ranks
            );
            return refuse(why);
        }
        loader.begin(0);
        Ok(loader)
    }

    /// Micro-batches of an epoch on each rank.
    pub fn batches_per_epoch(&self) -> usize {
        let share = self.dataset.len().div_ceil(self.options.ranks);
        if self.options.drop_last { share / self.options.batch } else { share.div_ceil(self.options.batch) }
    }

    /// The epoch, from 0.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Goes on where all ranks together have taken `samples`: what [`crate::Loaded::data_position`] says.
    pub fn go_to(&mut self, samples: u64) {
        let per_batch = (self.options.batch * self.options.ranks) as u64;
        let (batches, per_epoch) = (samples / per_batch, self.batches_per_epoch() as u64);
        self.begin(batches / per_epoch);
        self.next = (batches % per_epoch) as usize;
    }

    /// Samples that all ranks have taken, full micro-batches counted.
    pub fn position(&self) -> u64 {
        let batches = self.epoch * self.batches_per_epoch() as u64 + self.next as u64;
        batches * (self.options.batch * self.options.ranks) as u64
    }

    /// The same with each micro-batch as `collate` makes it of its samples.
    pub fn collated<B, F: FnMut(Vec<D::Sample>) -> B>(self, collate: F) -> Collated<D, F> {
        Collated { loader: self, collate }
    }

    fn begin(&mut self, epoch: u64) {
        (self.epoch, self.next) = (epoch, 0);
        self.order = (0..self.dataset.len()).collect();
        if let Some(seed) = self.options.shuffle {
            let key = RandomKey { seed, stream: stream_of_name("data loader"), step: epoch as u32 };
            self.order.sort_by_key(|&index| (key.block(index as u64), index));
        }
    }
}

impl<D: Dataset> Iterator for DataLoader<D> {
    type Item = Vec<D::Sample>;

    fn next(&mut self) -> Option<Vec<D::Sample>> {
        if self.next == self.batches_per_epoch() {
            self.begin(self.epoch + 1);
            return None;
        }
        let (options, len) = (self.options, self.dataset.len());
        let share = len.div_ceil(options.ranks);
        let first = self.next * options.batch;
        let own = first..(first + options.batch).min(share);
        self.next += 1;
        let sample = |turn: usize| self.dataset.get(self.order[(turn * options.ranks + options.rank) % len]);
        Some(own.map(sample).collect())
    }
}

/// A loader whose micro-batches a function puts together: DeepSpeed's `collate_fn`. It can fail, as one that makes tensors does.
#[derive(Debug, Clone)]
pub struct Collated<D, F> {
    loader: DataLoader<D>,
    collate: F,
}

impl<D: Dataset, F> Collated<D, F> {
    /// As [`DataLoader::epoch`].
    pub fn epoch(&self) -> u64 {
        self.loader.epoch()
    }

    /// As [`DataLoader::position`].
    pub fn position(&self) -> u64 {
        self.loader.position()
    }

    /// As [`DataLoader::go_to`].
    pub fn go_to(&mut self, samples: u64) {
        self.loader.go_to(samples);
    }
}

impl<D: Dataset, B, F: FnMut(Vec<D::Sample>) -> B> Iterator for Collated<D, F> {
    type Item = B;

    fn next(&mut self) -> Option<B> {
        self.loader.next().map(&mut self.collate)
    }
}

/// A loader that starts again at its end, for ever.
#[derive(Debug, Clone)]
pub struct RepeatingLoader<I>(pub I);

impl<I: Iterator> Iterator for RepeatingLoader<I> {
    type Item = I::Item;

    /// `None` only from a loader that has nothing at all.
    fn next(&mut self) -> Option<I::Item> {
        self.0.next().or_else(|| self.0.next())
    }
}

impl Engine {
    /// A loader of this engine's micro-batches over a data set, shuffled by the engine's seed; `dataloader_drop_last` says
    /// what happens to the last one.
    pub fn data_loader<D: Dataset>(&self, dataset: D) -> Result<DataLoader<D>> {
        if self.config.data_sampling.as_ref().is_some_and(|sampling| !sampling.metrics.is_empty()) {
            tracing::warn!(
                "curriculum_metrics: this loader draws all samples alike; the PoolSampler of ferrospeed-data draws by their difficulty"
            );
        }
        DataLoader::new(
            dataset,
            LoaderOptions {
                batch: self.train_micro_batch_size_per_gpu() as usize,
                rank: self.data_rank(),
                ranks: self.data_ranks(),
                shuffle: Some(self.seed),
                drop_last: self.config.dataloader_drop_last,
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn loader(samples: usize, ranks: usize, rank: usize, drop_last: bool) -> DataLoader<Vec<usize>> {
        let options = LoaderOptions { batch: 3, rank, ranks, shuffle: Some(7), drop_last };
        DataLoader::new((0..samples).collect(), options).unwrap()
    }

    #[test]
    fn an_epoch_visits_every_sample_and_the_next_one_in_another_order() {
        let epoch = |loader: &mut DataLoader<Vec<usize>>| loader.by_ref().flatten().collect::<Vec<_>>();
        let mut ranks: Vec<_> = (0..2).map(|rank| loader(20, 2, rank, false)).collect();
        let first: Vec<usize> = ranks.iter_mut().flat_map(epoch).collect();
        let second: Vec<usize> = ranks.iter_mut().flat_map(epoch).collect();
        assert_ne!(first, second);
        for mut seen in [first, second] {
            seen.sort_unstable();
            assert_eq!(seen, (0..20).collect::<Vec<_>>());
        }
        assert_eq!(ranks[0].epoch(), 2);
    }

    #[test]
    fn what_does_not_divide_is_repeated_or_dropped_as_told() {
        // 11 samples on 2 ranks: 6 each, one of them twice.
        let sizes = |drop_last| loader(11, 2, 1, drop_last).map(|batch| batch.len()).collect::<Vec<_>>();
        assert_eq!(sizes(false), [3, 3]);
        let sizes = |drop_last| loader(13, 2, 1, drop_last).map(|batch| batch.len()).collect::<Vec<_>>();
        assert_eq!((sizes(false), sizes(true)), (vec![3, 3, 1], vec![3, 3]));
        let too_few = LoaderOptions { batch: 3, rank: 0, ranks: 2, shuffle: None, drop_last: true };
        let error = DataLoader::new(vec![1, 2, 3, 4], too_few).unwrap_err().to_string();
        assert!(error.contains("4 samples are less than a micro-batch of 3 on each of 2 ranks"), "{error}");
    }

    #[test]
    fn a_function_makes_batches_of_samples_and_the_place_is_that_of_the_loader() {
        let mut sums = loader(20, 2, 0, true).collated(|samples| samples.into_iter().sum::<usize>());
        let first: Vec<usize> = sums.by_ref().collect();
        let plain: Vec<usize> = loader(20, 2, 0, true).map(|batch| batch.into_iter().sum()).collect();
        assert_eq!(first, plain);
        sums.go_to(6);
        assert_eq!((sums.position(), sums.epoch(), sums.next()), (6, 0, Some(plain[1])));
    }

    #[test]
    fn a_loader_goes_on_where_it_was() {
        let mut endless = RepeatingLoader(loader(20, 2, 0, true));
        let taken: Vec<Vec<usize>> = endless.by_ref().take(11).collect();
        for batches in 0..11 {
            let mut again = RepeatingLoader(loader(20, 2, 0, true));
            again.0.go_to(batches as u64 * 6);
            assert_eq!(again.0.position(), batches as u64 * 6);
            assert_eq!(again.next().as_ref(), Some(&taken[batches]));
        }
    }
}
