//! What each token should predict.

use ferrospeed_tensor::{DType, Tensor, ops};

use super::Tokens;
use crate::error::{ModelError, Result};

impl Tokens {
    /// How many of them are predicted: all but the first of each sequence or document. Labels may leave out more.
    pub fn predicted(&self) -> usize {
        let texts: usize = match &self.documents {
            Some(documents) => documents.iter().map(|borders| borders.len().saturating_sub(1)).sum(),
            None => self.ids.sizes().first().copied().unwrap_or(0),
        };
        self.ids.numel().saturating_sub(texts)
    }
}

/// What each token of `labels [sequences, tokens]` should predict: the next one, and the last of a sequence, or of each of
/// the documents in it, nothing.
pub(super) fn next_labels(labels: &Tensor, ignored: i64, documents: Option<&[Vec<usize>]>) -> Result<Tensor> {
    let tokens = labels.shape().last();
    let sequences = labels.numel() / tokens.max(1);
    let backend = labels.device().backend();
    let Some(documents) = documents else {
        let mut targets = Tensor::full([sequences, tokens], ignored as f32, DType::I64, labels.device())?;
        if tokens > 1 {
            backend.copy_blocks(labels, 1, tokens, targets.out()?, 0, tokens, sequences, tokens - 1)?;
        }
        return Ok(targets);
    };
    // Behind all labels, the one that does not count.
    let mut known = Tensor::full([labels.numel() + 1], ignored as f32, DType::I64, labels.device())?;
    let count = labels.numel();
    backend.copy_blocks(labels, 0, count, known.out()?, 0, count, 1, count)?;
    let next = next_places(documents, tokens);
    if next.len() != count {
        let why = format!("their lengths are those of {} tokens, and there are {count} labels", next.len());
        return Err(ModelError::config("documents", why));
    }
    let next = Tensor::from_slice(&next, [count], labels.device())?;
    Ok(ops::index_select(&known, 0, &next)?.view([sequences, tokens])?)
}

/// Of each token of all sequences, which is the next of its document; the number of all tokens where there is none.
fn next_places(documents: &[Vec<usize>], tokens: usize) -> Vec<i64> {
    let none = (documents.len() * tokens) as i64;
    let mut places = Vec::with_capacity(documents.len() * tokens);
    for (sequence, borders) in documents.iter().enumerate() {
        for document in borders.windows(2) {
            let [first, end] = [document[0], document[1]].map(|place| (sequence * tokens + place) as i64);
            places.extend((first + 1..end).chain([none]));
        }
    }
    places
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_predicts_the_first_token_of_a_document() {
        let labels: Vec<i64> = (10..22).collect();
        let labels = Tensor::from_slice(&labels, [2, 6], &ferrospeed_cpu::device()).unwrap();
        let targets = |documents: Option<&[Vec<usize>]>| {
            next_labels(&labels, -100, documents).unwrap().to_vec::<i64>().unwrap()
        };
        assert_eq!(targets(None), [11, 12, 13, 14, 15, -100, 17, 18, 19, 20, 21, -100]);
        assert_eq!(targets(Some(&[vec![0, 6], vec![0, 6]])), targets(None));
        let documents = [vec![0, 1, 4, 6], vec![0, 3, 6]];
        assert_eq!(targets(Some(&documents)), [-100, 12, 13, -100, 15, -100, 17, 18, -100, 20, 21, -100]);
        let error = next_labels(&labels, -100, Some(&[vec![0, 6]])).unwrap_err().to_string();
        assert!(error.contains("those of 6 tokens, and there are 12 labels"), "{error}");
    }
}
