//! What a run was trained on, as its checkpoints remember it, so that one that goes on with something else says so.

use ferrospeed_data::{Fingerprint, Sequences};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::recipe::Recipe;

/// Data, and how it is cut into documents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct DataState {
    train: Fingerprint,
    /// Where it is apart from what is trained on.
    validation: Option<Fingerprint>,
    documents: String,
    end_token: Option<u64>,
}

impl DataState {
    /// Reads some of it.
    pub(crate) fn of(recipe: &Recipe, sequences: &Sequences) -> Result<DataState> {
        let (train, validation) = sequences.fingerprints()?;
        let is_apart = recipe.data.documents_are_apart();
        let documents = if is_apart { "apart" } else { "together" }.to_owned();
        Ok(DataState { train, validation, documents, end_token: recipe.data.end_token.filter(|_| is_apart) })
    }

    /// A line for each thing that is another now.
    pub(crate) fn changes(&self, now: &DataState) -> Vec<String> {
        let mut changes = Vec::new();
        if self.train != now.train {
            changes.push(format!("data: {}", other_tokens("trained on", &self.train, &now.train)));
        }
        match (&self.validation, &now.validation) {
            (Some(before), Some(now)) if before != now => {
                changes.push(format!("data.validation: {}", other_tokens("validated on", before, now)));
            }
            (Some(_), None) => {
                changes.push("data.validation: files of its own -> a share of the data".into())
            }
            (None, Some(_)) => {
                changes.push("data.validation: a share of the data -> files of its own".into())
            }
            _ => {}
        }
        if self.documents != now.documents {
            changes.push(format!("data.documents: {} -> {}", self.documents, now.documents));
        }
        if self.documents == now.documents && self.end_token != now.end_token {
            let words = |token: Option<u64>| token.map_or("not given".to_owned(), |token| token.to_string());
            changes.push(format!("data.end_token: {} -> {}", words(self.end_token), words(now.end_token)));
        }
        changes
    }
}

fn other_tokens(done: &str, before: &Fingerprint, now: &Fingerprint) -> String {
    let those = format!("the tokens are not those that were {done} before");
    match before.tokens == now.tokens {
        false => format!("{those}: {} -> {} tokens", before.tokens, now.tokens),
        true if now.compared == now.tokens => format!("{those}, though as many"),
        true => format!("{those}, though as many (of {} tokens {} were compared)", now.tokens, now.compared),
    }
}
