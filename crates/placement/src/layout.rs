//! Who owns which elements: pure functions, no memory.
//!
//! Stages 1 and 2 lay the parameters of a group end to end and cut the whole into equal parts. Stage 3 cuts each
//! parameter by itself. Stage 0 does not cut. A [`Layout`] says the same thing for all of them: which stretches
//! ([`Fragment`]) of each parameter each rank owns, and where they lie in that rank's part.
//! (Rajbhandari, Rasley, Ruwase, He: "ZeRO: memory optimizations toward training trillion parameter models", 2020.)

/// A stretch of one parameter that one rank owns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fragment {
    /// The owner.
    pub rank: usize,
    /// Where it starts in the parameter.
    pub in_param: usize,
    /// Where it starts in the owner's part.
    pub in_part: usize,
    /// How many elements.
    pub len: usize,
}

/// How one group of parameters is spread over ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// How many ranks share it.
    pub ranks: usize,
    /// Elements of each rank's part, padding included.
    pub part_numel: usize,
    /// The order in which parameters lie, as indices into the group.
    pub order: Vec<usize>,
    /// The fragments of each parameter, by index into the group; in order of rank.
    pub fragments: Vec<Vec<Fragment>>,
    /// Elements of the padding that belongs to nobody, at the end of the last part.
    pub padding: usize,
}

/// Flat parts start at multiples of this many elements, so that 16-bit ones start at multiples of 4 bytes.
const FLAT_ALIGNMENT: usize = 2;

impl Layout {
    /// All parameters end to end, cut into equal parts. (Stages 1 and 2; with one rank, stage 0.)
    ///
    /// `round_robin` deals parameters out like cards first, so that ranks own alternate ones.
    pub fn flat(numels: &[usize], ranks: usize, round_robin: bool) -> Layout {
        let order: Vec<usize> = if round_robin {
            (0..ranks).flat_map(|first| (first..numels.len()).step_by(ranks)).collect()
        } else {
            (0..numels.len()).collect()
        };
        let total: usize = numels.iter().sum();
        let padded = total.next_multiple_of(FLAT_ALIGNMENT * ranks);
        let part_numel = padded / ranks;
        let mut fragments = vec![Vec::new(); numels.len()];
        let mut start = 0;
        for &param in &order {
            let end = start + numels[param];
            let mut at = start;
            while at < end {
                let rank = at / part_numel;
                let len = ((rank + 1) * part_numel).min(end) - at;
                fragments[param].push(Fragment {
                    rank,
                    in_param: at - start,
                    in_part: at - rank * part_numel,
                    len,
                });
                at += len;
            }
            start = end;
        }
        Layout { ranks, part_numel, order, fragments, padding: padded - total }
    }

    /// Each parameter cut into equal parts by itself, the last ones shorter or empty. (Stage 3.)
    pub fn per_parameter(numels: &[usize], ranks: usize) -> Layout {
        let mut fragments = Vec::with_capacity(numels.len());
        let mut in_part = 0;
        let mut padding = 0;
        for &numel in numels {
            let share = numel.div_ceil(ranks);
            let owned = |rank: usize| {
                let range = rank * share..((rank + 1) * share).min(numel);
                (!range.is_empty()).then_some(Fragment {
                    rank,
                    in_param: range.start,
                    in_part,
                    len: range.len(),
                })
            };
            fragments.push((0..ranks).filter_map(owned).collect());
            in_part += share;
            padding += share * ranks - numel;
        }
        Layout { ranks, part_numel: in_part, order: (0..numels.len()).collect(), fragments, padding }
    }

    /// The fragment of `param` that `rank` owns, if any. (No layout gives a rank two of one parameter.)
    pub fn fragment(&self, param: usize, rank: usize) -> Option<&Fragment> {
        self.fragments[param].iter().find(|fragment| fragment.rank == rank)
    }
}

/// Which stage-3 parameters stay whole: the small ones, while their total stays within the model's limit.
pub fn persistent(numels: &[usize], param_limit: u64, model_limit: u64) -> Vec<bool> {
    let mut total = 0u64;
    numels
        .iter()
        .map(|&numel| {
            let stays = total + numel as u64 <= model_limit && numel as u64 <= param_limit;
            total += if stays { numel as u64 } else { 0 };
            stays
        })
        .collect()
}
