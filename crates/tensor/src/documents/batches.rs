//! Documents brought together as batches of sequences of one length each.
//!
//! Kernels for whole sequences may be far faster than those that look at borders, and prepare themselves for every shape
//! anew. So documents of about one length become the sequences of a batch: lengths are rounded up to two in an octave, and
//! batches have powers of two of sequences. What fills up a sequence stands behind its document, where no causal query of the
//! document sees it, and gets no gradient.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Documents;
use crate::backend::Device;
use crate::error::Result;
use crate::tensor::Tensor;

/// No sequence is shorter.
const LEAST_TOKENS: usize = 64;
/// So many places for each token, and no more, are worth filling up.
const MOST_PLACES: usize = 2;

/// Sequences of one length that lie one behind the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch {
    /// How many.
    pub(crate) sequences: usize,
    /// Tokens of each.
    pub(crate) tokens: usize,
    /// The place of the first token among those of all batches.
    pub(crate) first: usize,
}

/// Where tokens go, and where they come back from. A token is counted over all rows, a place over all batches.
#[derive(Debug)]
pub(crate) struct Batches {
    pub(crate) all: Vec<Batch>,
    /// The token at each place, `I64`: behind a document its last token again,
    pub(crate) tokens: Tensor,
    /// or the number of all tokens, one more than there is: a gradient of nothing.
    pub(crate) or_none: Tensor,
    /// The place of each token, `I64`.
    pub(crate) places: Tensor,
}

/// The length of the sequence for a document, in rows of so many tokens.
fn rounded(length: usize, row: usize) -> usize {
    let octave = length.next_power_of_two();
    let shorter = octave / 4 * 3;
    let length = if length <= shorter { shorter } else { octave };
    length.min(row).max(LEAST_TOKENS)
}

/// The batches of documents of these lengths, and which documents are the sequences of each, in order.
fn layout(lengths: &[usize], row: usize) -> (Vec<Batch>, Vec<usize>) {
    let mut of_length = BTreeMap::<usize, Vec<usize>>::new();
    for (document, &length) in lengths.iter().enumerate() {
        of_length.entry(rounded(length, row)).or_default().push(document);
    }
    let (mut batches, mut order, mut first) = (Vec::new(), Vec::new(), 0);
    for (tokens, documents) in of_length {
        for bit in (0..usize::BITS).rev().filter(|bit| documents.len() >> bit & 1 == 1) {
            let sequences = 1 << bit;
            batches.push(Batch { sequences, tokens, first });
            first += sequences * tokens;
        }
        order.extend(documents);
    }
    (batches, order)
}

impl Batches {
    /// `None` where too much would have to be filled up.
    pub(crate) fn of(documents: &Documents, device: &Device) -> Result<Option<Batches>> {
        let Some((all, indices)) = indices(documents) else { return Ok(None) };
        let [tokens, or_none, places] =
            indices.map(|indices| Tensor::from_slice(&indices, [indices.len()], device));
        Ok(Some(Batches { all, tokens: tokens?, or_none: or_none?, places: places? }))
    }
}

/// The batches, and the numbers of [`Batches::tokens`], [`Batches::or_none`] and [`Batches::places`].
fn indices(documents: &Documents) -> Option<(Vec<Batch>, [Vec<i64>; 3])> {
    let row = documents.tokens();
    let of_row =
        |number: usize| documents.of_row(number).map(move |d| number * row + d.start..number * row + d.end);
    let all: Vec<Range<usize>> = (0..documents.rows()).flat_map(of_row).collect();
    let (batches, order) = layout(&all.iter().map(Range::len).collect::<Vec<_>>(), row);
    let count = documents.rows() * row;
    let wanted = batches.iter().map(|batch| batch.sequences * batch.tokens).sum::<usize>();
    if wanted > MOST_PLACES * count {
        return None;
    }
    let (mut tokens, mut or_none, mut places) =
        (Vec::with_capacity(wanted), Vec::with_capacity(wanted), vec![0; count]);
    for (document, length) in order.iter().map(|&number| all[number].clone()).zip(lengths(&batches)) {
        let last = document.end - 1;
        for (place, token) in (tokens.len() as i64..).zip(document.clone()) {
            places[token] = place;
        }
        let filling = length - document.len();
        tokens.extend(document.clone().chain(std::iter::repeat_n(last, filling)).map(|token| token as i64));
        or_none.extend(document.chain(std::iter::repeat_n(count, filling)).map(|token| token as i64));
    }
    Some((batches, [tokens, or_none, places]))
}

/// Of each sequence of the batches.
fn lengths(batches: &[Batch]) -> impl Iterator<Item = usize> {
    batches.iter().flat_map(|batch| std::iter::repeat_n(batch.tokens, batch.sequences))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_two_in_an_octave_and_no_more_than_a_row() {
        let of = |length| rounded(length, 2560);
        assert_eq!(
            [1, 64, 65, 96, 97, 128, 129, 1025, 1537].map(of),
            [64, 64, 96, 96, 128, 128, 192, 1536, 2048]
        );
        assert_eq!(of(2500), 2560);
        assert_eq!(rounded(10, 32), 64);
    }

    #[test]
    fn every_document_is_one_sequence_of_a_batch() {
        let (batches, order) = layout(&[100, 60, 64, 300, 10, 128, 1, 2, 3], 300);
        let batch = |sequences, tokens, first| Batch { sequences, tokens, first };
        assert_eq!(batches, [batch(4, 64, 0), batch(2, 64, 256), batch(2, 128, 384), batch(1, 300, 640)]);
        assert_eq!(order, [1, 2, 4, 6, 7, 8, 0, 5, 3]);
    }

    #[test]
    fn every_token_has_a_place_where_it_is_found() {
        let documents = Documents::on_host(vec![vec![0, 70, 130, 200], vec![0, 200]]).unwrap();
        let (_, [tokens, or_none, places]) = indices(&documents).unwrap();
        assert!((0..400).all(|token| tokens[places[token] as usize] == token as i64));
        let mut held: Vec<i64> = or_none.iter().copied().filter(|&token| token < 400).collect();
        held.sort_unstable();
        assert_eq!(held, (0..400).collect::<Vec<i64>>());
        assert!(or_none.iter().zip(&tokens).all(|(none, token)| none == token || *none == 400));
        // Documents of one token are not worth 64 places.
        let crumbs = Documents::on_host(vec![(0..=100).collect()]).unwrap();
        assert!(indices(&crumbs).is_none());
    }
}
