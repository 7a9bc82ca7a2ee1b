//! What a repository holds at one commit: the server's list, with what each file's bytes must be.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::name::{is_commit, is_plain_path};

/// What a repository holds at one commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Listing {
    pub(crate) commit: String,
    pub(crate) files: Vec<RemoteFile>,
}

/// One file of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RemoteFile {
    pub(crate) path: String,
    /// Bytes.
    pub(crate) size: Option<u64>,
    /// The name of its bytes in the cache.
    pub(crate) hash: Option<String>,
}

impl RemoteFile {
    /// Whether it lies in a folder, and has the size that the list gives, if it gives one.
    pub(crate) fn is_whole_in(&self, root: &Path) -> bool {
        let about = std::fs::metadata(root.join(&self.path));
        about.is_ok_and(|about| about.is_file() && self.size.is_none_or(|size| about.len() == size))
    }
}

impl Listing {
    /// The server's answer about a revision: `sha`, and of each of `siblings` the name, the size, and the hash of its bytes, which of
    /// a large file is in `lfs`.
    pub(crate) fn read(value: &Value) -> Result<Listing, String> {
        let commit =
            value["sha"].as_str().filter(|commit| is_commit(commit)).ok_or("has no commit ('sha')")?;
        let siblings = value["siblings"].as_array().ok_or("has no list of files ('siblings')")?;
        let mut files = Vec::with_capacity(siblings.len());
        for sibling in siblings {
            let path = sibling["rfilename"].as_str().ok_or("names a file without a name ('rfilename')")?;
            if !is_plain_path(path) {
                return Err(format!("names a file outside of the repository: '{path}'"));
            }
            let text = |value: &Value| value.as_str().filter(|hash| is_hash(hash)).map(str::to_owned);
            let hash = text(&sibling["lfs"]["sha256"]).or_else(|| text(&sibling["blobId"]));
            let size = sibling["lfs"]["size"].as_u64().or_else(|| sibling["size"].as_u64());
            files.push(RemoteFile { path: path.to_owned(), size, hash });
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(Listing { commit: commit.to_owned(), files })
    }

    pub(crate) fn file(&self, path: &str) -> Option<&RemoteFile> {
        self.files.iter().find(|file| file.path == path)
    }
}

/// Whether it is a hash that bytes can be compared with: SHA-256 of them, or SHA-1 as git has it.
pub(crate) fn is_hash(text: &str) -> bool {
    matches!(text.len(), 40 | 64) && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The hash of bytes as they come, of the kind that the list has.
pub(crate) enum Hasher {
    /// Of a large file.
    Sha256(Sha256),
    /// Of a small one: git's, over a head that says how long it is.
    Git(sha1::Sha1),
    /// The list has none.
    None,
}

impl Hasher {
    pub(crate) fn of(hash: &str, size: u64) -> Hasher {
        match (is_hash(hash), hash.len()) {
            (true, 64) => Hasher::Sha256(Sha256::new()),
            (true, _) => {
                let mut hasher = sha1::Sha1::new();
                sha1::Digest::update(&mut hasher, format!("blob {size}\0"));
                Hasher::Git(hasher)
            }
            (false, _) => Hasher::None,
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hasher) => hasher.update(bytes),
            Hasher::Git(hasher) => sha1::Digest::update(hasher, bytes),
            Hasher::None => {}
        }
    }

    /// The hash, if there is one to compare with.
    pub(crate) fn finish(self) -> Option<String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Hasher::Sha256(hasher) => Some(hex(&hasher.finalize())),
            Hasher::Git(hasher) => Some(hex(&sha1::Digest::finalize(hasher))),
            Hasher::None => None,
        }
    }
}
