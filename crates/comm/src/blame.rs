//! Who is to blame: whether what this process fails with is that another rank has failed.
//!
//! Errors are wrapped on their way to a program's end, and kept as texts by other ranks, so what is looked for is their text. A
//! launcher that sees several ranks fail names the one that failed by itself ([`FOLLOWER_VARIABLE`]).

use std::sync::{Mutex, PoisonError};

/// The variable by which a launcher says with which exit code a rank ends that has failed only because another has.
pub const FOLLOWER_VARIABLE: &str = "FERROSPEED_FOLLOWER_EXIT";

/// The last ones decide, and a rank that goes on failing keeps no more.
const KEPT: usize = 16;

static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Keeps the text of an error that names another rank as the one that failed.
pub fn note(error: &str) {
    let mut said = SAID.lock().unwrap_or_else(PoisonError::into_inner);
    if said.len() == KEPT {
        said.remove(0);
    }
    said.push(error.to_owned());
}

/// The exit code for a failure whose text this is, where it is another's and the launcher has asked for one of its own.
pub fn follower_exit(failure: &str) -> Option<u8> {
    let asked = std::env::var(FOLLOWER_VARIABLE).ok()?.parse().ok()?;
    is_of_another(failure).then_some(asked)
}

fn is_of_another(failure: &str) -> bool {
    SAID.lock().unwrap_or_else(PoisonError::into_inner).iter().any(|said| failure.contains(said))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_that_holds_anothers_is_of_another() {
        note("rank 7 left the job");
        assert!(is_of_another("stage 2: the batch: rank 7 left the job"));
        assert!(!is_of_another("model.safetensors: no space left on device"));
        (0..KEPT).for_each(|rank| note(&format!("rank {rank}.")));
        assert!(!is_of_another("rank 7 left the job"));
    }
}
