//! Where a rank has its job's token from.
//!
//! `ferrospeed launch` hands it over in the environment, which only the same user can read. `mpirun` and `srun` make
//! none: on one host rank 0 then leaves a secret in its user's private folder ([`meeting`](super::meeting)); across hosts
//! the user exports a token, or names a file that every host sees. Nothing that others can know, such as a job's number,
//! stands in for it.

use std::path::Path;

use crate::error::{Error, Result};
use crate::private;

/// Holds the token itself.
const TOKEN: &str = "FERROSPEED_JOB_TOKEN";
/// Names a file with the token, which only its owner may read.
const TOKEN_FILE: &str = "FERROSPEED_JOB_TOKEN_FILE";

/// The token that was handed over by `FERROSPEED_JOB_TOKEN` or `FERROSPEED_JOB_TOKEN_FILE`, if any.
pub fn handed_over_token(lookup: impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    if let Some(token) = lookup(TOKEN) {
        return Ok(Some(token));
    }
    let Some(path) = lookup(TOKEN_FILE) else { return Ok(None) };
    let refuse = |problem: String| Error::Environment { variable: TOKEN_FILE.into(), problem };
    match private::read_line(Path::new(&path)) {
        Ok(token) if token.is_empty() => Err(refuse(format!("{path} is empty"))),
        Ok(token) => Ok(Some(token)),
        Err(error) => Err(refuse(format!("{path}: {error}"))),
    }
}

/// Ranks on several hosts were given none.
pub(super) fn missing() -> Error {
    Error::Environment {
        variable: TOKEN.into(),
        problem: format!(
            "not set, and the ranks lie on several hosts. Start them with `ferrospeed launch`; or `export \
             {TOKEN}=$(openssl rand -hex 16)` first, which srun hands over by itself and mpirun with \
             `-x {TOKEN}`; or put the token into a file of mode 600 that every host sees and name it by {TOKEN_FILE}"
        ),
    }
}
