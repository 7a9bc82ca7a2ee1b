//! Gradients of tables as rows: only what some rank has touched travels.
//!
//! The ranks tell each other which rows they have and reduce those, laid end to end, as they would reduce the whole: so
//! the sums are the same to the last bit. Where one rank has a whole gradient (a table that is used in another way as
//! well), or most rows are touched, the whole table is reduced instead; all ranks see that alike.

use ferrospeed_tensor::{Category, Out, RowGradient, Tensor};

use super::{Arrived, Reducer};
use crate::error::Result;
use ferrospeed_collective::exchange;

/// What a rank says that has a whole gradient.
const WHOLE: i64 = -1;

impl Reducer {
    /// Reduces a table's gradient by rows into its buffer; `false` when it must be reduced whole.
    pub(crate) fn reduce_rows(&mut self, bucket: usize) -> Result<bool> {
        let param = self.buckets[bucket].params[0];
        let group = self.road(bucket).sharding.shard.clone();
        let ranks = group.size();
        let rows = match &self.arrived[param] {
            Some(Arrived::Rows(rows)) => Some(rows.clone()),
            _ => None,
        };
        let own: &[i64] = rows.as_ref().map_or(&[], RowGradient::ids);
        let is_whole = rows.is_none() && self.arrived[param].is_some();
        let mut counts = vec![0i64; ranks];
        group.all_gather(&[if is_whole { WHOLE } else { own.len() as i64 }], &mut counts)?;
        if counts.contains(&WHOLE) {
            return Ok(false);
        }
        let counts: Vec<usize> = counts.into_iter().map(|count| count as usize).collect();
        let mut ids = vec![0i64; counts.iter().sum()];
        group.all_gather_unequal(own, &mut ids, &counts)?;
        ids.sort_unstable();
        ids.dedup();
        let (entries, width) = (self.shapes[param].0[0], self.shapes[param].0[1]);
        if ids.len() * 2 > entries {
            return Ok(false);
        }
        let mut shared = Tensor::zeros_in([ids.len() * width], self.wire, &self.device, Category::Buffers)?;
        if let Some(rows) = &rows {
            let places: Vec<i64> =
                rows.ids().iter().map(|id| ids.partition_point(|other| other < id) as i64).collect();
            let values = self.prepared(bucket, rows.values().clone())?;
            self.copy_rows(&values, shared.out()?, &places, width)?;
        }
        if !ids.is_empty() {
            let road = self.road(bucket);
            exchange::all_reduce(road.sharding.levels(), &shared, road.operation())?.wait()?;
        }
        self.arrived[param] = None;
        let buffer = self.buffer(bucket)?;
        // SAFETY: no exchange of this bucket is under way, and of a table in rows no place is lent.
        let mut target = unsafe { Out::vouched(&buffer) };
        match self.touched[bucket].take() {
            None => self.device.backend().fill(target.again(), 0.0)?,
            Some(earlier) => {
                for (_, first, count) in runs(&earlier) {
                    let mut rows = target.again().part(first * width, [count * width])?;
                    self.device.backend().fill(rows.out(), 0.0)?;
                }
            }
        }
        self.copy_rows(&shared, target, &ids, width)?;
        self.touched[bucket] = Some(ids);
        Ok(true)
    }

    /// Copies rows that lie end to end to the rows `ids` of another tensor.
    fn copy_rows(&self, from: &Tensor, mut to: Out<'_>, ids: &[i64], width: usize) -> Result<()> {
        for (row, first, count) in runs(ids) {
            let len = count * width;
            self.device.backend().copy_blocks(
                from,
                row * width,
                len,
                to.again(),
                first * width,
                len,
                1,
                len,
            )?;
        }
        Ok(())
    }
}

/// Runs of consecutive ids: (where the run starts among them, its first id, how many).
fn runs(ids: &[i64]) -> Vec<(usize, usize, usize)> {
    let mut runs: Vec<(usize, usize, usize)> = Vec::new();
    for (at, &id) in ids.iter().enumerate() {
        match runs.last_mut() {
            Some((_, first, count)) if *first + *count == id as usize => *count += 1,
            _ => runs.push((at, id as usize, 1)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_ids_are_one_run() {
        assert_eq!(runs(&[1, 2, 3, 7, 9, 10]), [(0, 1, 3), (3, 7, 1), (4, 9, 2)]);
        assert!(runs(&[]).is_empty());
    }
}
