//! The batch triangle: total = micro batch × accumulation steps × data-parallel ranks.

use std::num::NonZeroU64;

use serde::Serialize;

/// The three batch sizes, which agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BatchSizes {
    /// Samples per optimizer step over all ranks.
    pub train_batch_size: NonZeroU64,
    /// Samples per rank in one pass.
    pub train_micro_batch_size_per_gpu: NonZeroU64,
    /// Passes per optimizer step.
    pub gradient_accumulation_steps: NonZeroU64,
}

/// The batch sizes that a file gives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GivenBatchSizes {
    /// `train_batch_size`.
    pub train: Option<NonZeroU64>,
    /// `train_micro_batch_size_per_gpu`.
    pub micro: Option<NonZeroU64>,
    /// `gradient_accumulation_steps`.
    pub accumulation: Option<NonZeroU64>,
}

/// Why batch sizes cannot be completed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// Neither of the two that could be completed is given.
    #[error("neither `train_batch_size` nor `train_micro_batch_size_per_gpu` is given")]
    Underdetermined,
    /// The division does not come out even.
    #[error("{total} samples cannot be divided evenly over {divisor_in_words}")]
    Uneven {
        /// The batch.
        total: u64,
        /// What divides it.
        divisor: u64,
        /// That, in words.
        divisor_in_words: String,
    },
    /// All three are given and do not agree.
    #[error(
        "train_batch_size is not micro batch × accumulation steps × ranks: {total} ≠ {micro} × {accumulation} × {ranks}"
    )]
    Disagree {
        /// `train_batch_size`.
        total: u64,
        /// `train_micro_batch_size_per_gpu`.
        micro: u64,
        /// `gradient_accumulation_steps`.
        accumulation: u64,
        /// The data-parallel ranks.
        ranks: u64,
    },
    /// The product does not fit 64 bits.
    #[error("the batch is too large: {micro} × {accumulation} × {ranks} does not fit 64 bits")]
    TooLarge {
        /// `train_micro_batch_size_per_gpu`.
        micro: u64,
        /// `gradient_accumulation_steps`.
        accumulation: u64,
        /// The data-parallel ranks.
        ranks: u64,
    },
}

impl BatchError {
    /// What to write instead.
    pub fn help(&self) -> String {
        match self {
            BatchError::Underdetermined => {
                "add \"train_micro_batch_size_per_gpu\" (samples per rank) or \"train_batch_size\" (samples in total)".into()
            }
            BatchError::Uneven { total, divisor, .. } => {
                let below = total / divisor * divisor;
                let above = below.saturating_add(*divisor);
                match below {
                    0 => format!("write a train_batch_size that is a multiple of {divisor}, such as {above}"),
                    _ => format!("write a train_batch_size that is a multiple of {divisor}, such as {below} or {above}"),
                }
            }
            BatchError::Disagree { micro, accumulation, ranks, .. } => match
                micro.checked_mul(*accumulation).and_then(|product| product.checked_mul(*ranks))
            {
                Some(product) => format!("write \"train_batch_size\": {product}, or remove one of the three"),
                None => "remove one of the three".into(),
            },
            BatchError::TooLarge { .. } => "write smaller numbers".into(),
        }
    }
}

/// Completes the batch sizes for a number of data-parallel ranks.
pub fn complete(given: GivenBatchSizes, ranks: NonZeroU64) -> Result<BatchSizes, BatchError> {
    let one = NonZeroU64::MIN;
    let sizes = |train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps| BatchSizes {
        train_batch_size,
        train_micro_batch_size_per_gpu,
        gradient_accumulation_steps,
    };
    let product = |micro: NonZeroU64, accumulation: NonZeroU64| {
        micro.checked_mul(accumulation).and_then(|product| product.checked_mul(ranks)).ok_or(
            BatchError::TooLarge { micro: micro.get(), accumulation: accumulation.get(), ranks: ranks.get() },
        )
    };
    match (given.train, given.micro, given.accumulation) {
        (Some(train), Some(micro), Some(accumulation)) => {
            if product(micro, accumulation).ok() != Some(train) {
                return Err(BatchError::Disagree {
                    total: train.get(),
                    micro: micro.get(),
                    accumulation: accumulation.get(),
                    ranks: ranks.get(),
                });
            }
            Ok(sizes(train, micro, accumulation))
        }
        (Some(train), Some(micro), None) => {
            let words = format!("micro batches of {micro} on {ranks} ranks");
            Ok(sizes(train, micro, divide(train, micro, ranks, words)?))
        }
        (Some(train), None, Some(accumulation)) => {
            let words = format!("{accumulation} accumulation steps on {ranks} ranks");
            Ok(sizes(train, divide(train, accumulation, ranks, words)?, accumulation))
        }
        (Some(train), None, None) => {
            Ok(sizes(train, divide(train, one, ranks, format!("{ranks} ranks"))?, one))
        }
        (None, Some(micro), accumulation) => {
            let accumulation = accumulation.unwrap_or(one);
            Ok(sizes(product(micro, accumulation)?, micro, accumulation))
        }
        (None, None, _) => Err(BatchError::Underdetermined),
    }
}

fn divide(
    total: NonZeroU64,
    by: NonZeroU64,
    ranks: NonZeroU64,
    words: String,
) -> Result<NonZeroU64, BatchError> {
    let divisor = by.saturating_mul(ranks);
    let quotient = NonZeroU64::new(total.get() / divisor).filter(|_| total.get() % divisor == 0);
    quotient.ok_or(BatchError::Uneven { total: total.get(), divisor: divisor.get(), divisor_in_words: words })
}
