//! Documents that lie one behind the other in the rows of a batch.
//!
//! Rows of one length are filled without padding by packing short documents into them. [`Documents`] says where each begins,
//! so that attention stops at its borders and positions start anew: every token is then computed as if its document stood
//! alone.
//!
//! ```
//! use ferrospeed_tensor::Documents;
//!
//! # fn main() -> ferrospeed_tensor::Result<()> {
//! // One row of eight tokens: documents of three, one and four.
//! let documents = Documents::new(vec![vec![0, 3, 4, 8]], &ferrospeed_cpu::device())?;
//! assert_eq!(documents.positions(), [[0, 1, 2, 0, 0, 1, 2, 3]]);
//! # Ok(())
//! # }
//! ```

mod batches;

use std::ops::Range;
use std::sync::Arc;

use crate::backend::Device;
use crate::error::{Result, TensorError};
use crate::tensor::Tensor;

pub(crate) use batches::Batches;

const OP: &str = "documents";

/// The documents in rows of one length.
#[derive(Debug, Clone)]
pub struct Documents {
    /// Per row, where each document begins, and behind them the length of the row.
    borders: Arc<[Vec<usize>]>,
    tokens: usize,
    /// `[rows, tokens, 2]` of `I64` on a device that does not read the above: where each token's document begins and ends.
    table: Option<Tensor>,
    /// And how they are brought together for kernels that know whole sequences alone, where that is worth it.
    batches: Option<Arc<Batches>>,
}

impl Documents {
    /// From the cumulative lengths of each row's documents: `0`, then where each one ends, the last of them with its row.
    pub fn new(borders: Vec<Vec<usize>>, device: &Device) -> Result<Documents> {
        let mut documents = Documents::on_host(borders)?;
        if !device.backend().is_host() {
            let shape = [documents.rows(), documents.tokens, 2];
            documents.table = Some(Tensor::from_slice(&documents.ends(), shape, device)?);
            documents.batches = Batches::of(&documents, device)?.map(Arc::new);
        }
        Ok(documents)
    }

    /// Without what other devices need.
    fn on_host(borders: Vec<Vec<usize>>) -> Result<Documents> {
        let tokens = borders.first().and_then(|row| row.last()).copied().unwrap_or(0);
        for (row, places) in borders.iter().enumerate() {
            let refuse = |why: String| {
                Err(TensorError::argument(OP, format!("cumulative lengths of row {row}: {why}")))
            };
            if places.first() != Some(&0) || places.len() < 2 {
                return refuse(format!("{places:?} do not begin with 0 and an end"));
            }
            if let Some(pair) = places.windows(2).find(|pair| pair[0] >= pair[1]) {
                return refuse(format!("{} is not above {}, the one before", pair[1], pair[0]));
            }
            if places.last() != Some(&tokens) {
                return refuse(format!("they end at {:?}, row 0 at {tokens}", places.last()));
            }
        }
        Ok(Documents { borders: borders.into(), tokens, table: None, batches: None })
    }

    /// Of every token, where its document begins and ends.
    fn ends(&self) -> Vec<i64> {
        let of_document = |document: Range<usize>| {
            let ends = [document.start as i64, document.end as i64];
            std::iter::repeat_n(ends, document.len())
        };
        (0..self.rows()).flat_map(|row| self.of_row(row)).flat_map(of_document).flatten().collect()
    }

    /// How many rows there are.
    pub fn rows(&self) -> usize {
        self.borders.len()
    }

    /// Tokens of a row.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The tokens of each document of a row.
    pub fn of_row(&self, row: usize) -> impl Iterator<Item = Range<usize>> {
        self.borders[row].windows(2).map(|pair| pair[0]..pair[1])
    }

    /// Of every token of every row, how far it is from the beginning of its document.
    pub fn positions(&self) -> Vec<Vec<usize>> {
        let of_row = |row| self.of_row(row).flat_map(|document| 0..document.len()).collect();
        (0..self.rows()).map(of_row).collect()
    }

    /// Where each token's document begins and ends, `[rows, tokens, 2]`, on a device that is not the host.
    pub fn table(&self) -> Option<&Tensor> {
        self.table.as_ref()
    }

    /// How they are brought together as whole sequences, on a device that is not the host.
    pub(crate) fn batches(&self) -> Option<&Arc<Batches>> {
        self.batches.as_ref()
    }

    /// Refuses a batch that is not these rows.
    pub(crate) fn expect(&self, op: &'static str, rows: usize, tokens: usize) -> Result<()> {
        if (self.rows(), self.tokens) == (rows, tokens) {
            return Ok(());
        }
        let why = format!(
            "documents are described for {} rows of {} tokens, and there are {rows} of {tokens}",
            self.rows(),
            self.tokens
        );
        Err(TensorError::argument(op, why))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn borders_that_do_not_ascend_from_nothing_to_the_end_of_the_row_are_refused() {
        for (borders, expected) in [
            (vec![vec![]], "row 0: [] do not begin with 0 and an end"),
            (vec![vec![0]], "do not begin with 0"),
            (vec![vec![1, 4]], "do not begin with 0"),
            (vec![vec![0, 3, 3, 4]], "row 0: 3 is not above 3"),
            (vec![vec![0, 3, 2, 4]], "row 0: 2 is not above 3"),
            (vec![vec![0, 4], vec![0, 2, 5]], "row 1: they end at Some(5), row 0 at 4"),
            (vec![vec![0, 4], vec![0, 2]], "row 1: they end at Some(2), row 0 at 4"),
        ] {
            let error = Documents::on_host(borders).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let documents = Documents::on_host(vec![vec![0, 4], vec![0, 1, 4]]).unwrap();
        assert!(documents.expect("attention", 2, 4).is_ok());
        let error = documents.expect("attention", 2, 5).unwrap_err().to_string();
        assert!(error.contains("2 rows of 4 tokens, and there are 2 of 5"), "{error}");
    }

    #[test]
    fn the_table_says_of_every_token_where_its_document_is() {
        let documents = Documents::on_host(vec![vec![0, 1, 3], vec![0, 3]]).unwrap();
        assert_eq!(documents.ends(), [0, 1, 1, 3, 1, 3, 0, 3, 0, 3, 0, 3]);
    }
}
