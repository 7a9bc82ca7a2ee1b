//! Hugging Face's cache, as `huggingface_hub` lays it out:
//!
//! ```text
//! models--org--name/          datasets--… for data
//!   refs/main                 the commit that a branch or a tag means
//!   blobs/HASH                a file's bytes
//!   snapshots/COMMIT/…        links to blobs, under the names that the files have in the repository
//!   .listings/COMMIT.json     ours: what the repository holds at that commit, so that what is whole can be told without the server
//! .locks/models--org--name/HASH.lock
//! ```

use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{HubError, Result};
use crate::listing::Listing;
use crate::name::{HubName, RepoKind, is_commit};

/// A list of files is no larger.
const MAX_LISTING_BYTES: u64 = 64 << 20;
/// Nor is what a reference says.
const MAX_REFERENCE_BYTES: u64 = 256;

/// The folder of one repository in the cache.
#[derive(Debug)]
pub struct Repository {
    root: PathBuf,
    locks: PathBuf,
}

impl Repository {
    /// Where a repository lies, whether or not anything of it is there.
    pub fn of(cache: &Path, name: &HubName) -> Repository {
        let kind = match name.kind() {
            RepoKind::Model => "models",
            RepoKind::Dataset => "datasets",
        };
        let folder = format!("{kind}--{}", name.repository().replace('/', "--"));
        Repository { root: cache.join(&folder), locks: cache.join(".locks").join(folder) }
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Its files at a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// The commit that a revision means, as far as the cache knows.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let text = ferrospeed_files::read_text(self.root.join("refs").join(revision), MAX_REFERENCE_BYTES);
        text.ok().map(|text| text.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// What the repository holds at a commit, where the server was asked by this program.
    pub(crate) fn listing(&self, commit: &str) -> Option<Listing> {
        let bytes = ferrospeed_files::read(self.listing_path(commit), MAX_LISTING_BYTES).ok()?;
        serde_json::from_slice::<Listing>(&bytes).ok().filter(|listing| listing.commit == commit)
    }

    /// Writes down what the server says: the commit that a revision means, and what it holds.
    pub(crate) fn note(&self, revision: &str, listing: &Listing) -> Result<()> {
        let text = serde_json::to_vec(listing).unwrap_or_default();
        write(&self.listing_path(&listing.commit), &text)?;
        make_folder(&self.snapshot(&listing.commit))?;
        if is_commit(revision) {
            return Ok(());
        }
        write(&self.root.join("refs").join(revision), listing.commit.as_bytes())
    }

    /// Where a file's bytes lie.
    pub(crate) fn blob(&self, hash: &str) -> Result<PathBuf> {
        let folder = self.root.join("blobs");
        make_folder(&folder)?;
        Ok(folder.join(hash))
    }

    /// The file on which the lock of a blob is taken: the one that `huggingface_hub` takes.
    pub(crate) fn lock_file(&self, hash: &str) -> Result<File> {
        make_folder(&self.locks)?;
        let path = self.lock_path(hash);
        ferrospeed_files::open_lock(&path).map_err(HubError::io(&path))
    }

    /// Where that file is.
    pub(crate) fn lock_path(&self, hash: &str) -> PathBuf {
        self.locks.join(format!("{hash}.lock"))
    }

    /// Gives a blob the name that the file has in the repository.
    pub(crate) fn link(&self, commit: &str, file: &str, blob: &Path) -> Result<()> {
        let path = self.snapshot(commit).join(file);
        let failed = |error| HubError::Io { path: path.clone(), source: error };
        let size = |path: &Path| std::fs::metadata(path).map(|about| about.len()).ok();
        // What is there and has another size is not what the blob is.
        if size(&path).is_some_and(|found| Some(found) == size(blob)) {
            return Ok(());
        }
        make_folder(path.parent().unwrap_or(&self.root))?;
        let name = blob.file_name().unwrap_or_default();
        let up: PathBuf = std::iter::repeat_n("..", 2 + file.matches('/').count()).collect();
        // A link that leads nowhere: its blob was removed.
        let _ = std::fs::remove_file(&path);
        match std::os::unix::fs::symlink(up.join("blobs").join(name), &path) {
            Ok(()) => Ok(()),
            // Another process was faster.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
            // A file system without links: the bytes lie where the name is.
            Err(error) if error.kind() == ErrorKind::Unsupported || error.raw_os_error() == Some(1) => {
                std::fs::rename(blob, &path).map_err(failed)
            }
            Err(error) => Err(failed(error)),
        }
    }

    fn listing_path(&self, commit: &str) -> PathBuf {
        self.root.join(".listings").join(format!("{commit}.json"))
    }
}

pub(crate) fn make_folder(path: &Path) -> Result<()> {
    ferrospeed_files::create_folder(path).map_err(HubError::io(path))
}

/// Opens what is there of a file that is not whole, to go on with it.
pub(crate) fn open_unfinished(path: &Path) -> Result<File> {
    let options = OpenOptions::new().create(true).truncate(false).read(true).write(true).clone();
    ferrospeed_files::open_to_write(path, &options).map_err(HubError::io(path))
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    make_folder(path.parent().unwrap_or(path))?;
    ferrospeed_files::write(path, bytes).map_err(HubError::io(path))
}
