//! Models and data by their names on the Hugging Face Hub: found in its cache, else downloaded into it.
//!
//! The cache is Hugging Face's own, in its own layout ([`cache`]): what `transformers`, `datasets` or `hf download` have brought is
//! found, and what is brought here they find. What is there needs no network. A name without a revision means the one that the cache
//! knows as `main`; [`Hub::refresh`] asks the server for a newer one.
//!
//! A file is written beside its place, goes on where a broken connection left it, is compared with the size and the hash that the
//! server's list gives, and only then takes its name. Processes that want the same file take turns at it: one downloads, the others
//! find it.
//!
//! ```no_run
//! use std::ops::ControlFlow;
//!
//! use ferrospeed_hub::{Hub, HubName, RepoKind, Wanted};
//!
//! let name = HubName::parse("Qwen/Qwen3-0.6B", RepoKind::Model)?;
//! let folder = Hub::from_environment()?.bring(&name, &Wanted::Model, &mut |_| ControlFlow::Continue(()))?;
//! println!("{}", folder.root.display());
//! # Ok::<(), ferrospeed_hub::HubError>(())
//! ```

#![warn(missing_docs)]

pub mod cache;
mod client;
mod environment;
mod error;
mod listing;
mod name;
mod patience;
mod select;
mod transfer;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use environment::{HubOptions, Network};
pub use error::{HubError, Result};
pub use name::{HubName, RepoKind};
pub use select::Wanted;

use cache::Repository;
use client::Client;
use listing::Listing;
use patience::Patience;

/// How far a download is.
#[derive(Debug, Clone, Copy)]
pub struct Progress<'a> {
    /// Whose files they are: `org/name`.
    pub repository: &'a str,
    /// The file that is on its way.
    pub file: &'a str,
    /// What goes on with it.
    pub phase: Phase,
    /// Of all files that were wanted, so many bytes are here.
    pub bytes: u64,
    /// Of so many.
    pub total_bytes: u64,
}

/// What goes on with a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// It comes.
    Receiving,
    /// The server was asked, and for so long nothing new has come of it.
    Silent {
        /// Since something came.
        waited: Duration,
        /// When it is given up.
        limit: Duration,
    },
    /// Another process downloads it, and this one waits.
    Waiting {
        /// Which, where that can be known.
        process: Option<u32>,
    },
}

/// Whoever listens to a download, and may end it: ten times a second while it waits.
pub type Tell<'a> = dyn FnMut(&Progress<'_>) -> ControlFlow<()> + 'a;

/// Files of a repository that are here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The folder of the repository at one commit.
    pub root: PathBuf,
    /// The files that were wanted, in the order of their names.
    pub files: Vec<PathBuf>,
    /// Why it is not known to be all that was wanted, or the newest.
    pub note: Option<String>,
}

/// The Hub as this process sees it: a cache, and a server if one may be asked.
#[derive(Debug)]
pub struct Hub {
    options: HubOptions,
    client: Arc<Client>,
}

impl Hub {
    /// As Hugging Face's variables say: `HF_HOME`, `HF_HUB_CACHE`, `HF_ENDPOINT`, `HF_TOKEN`, `HF_HUB_OFFLINE`.
    pub fn from_environment() -> Result<Hub> {
        Hub::new(HubOptions::from_environment()?)
    }

    /// As it is told.
    pub fn new(options: HubOptions) -> Result<Hub> {
        let client = Arc::new(Client::new(&options)?);
        Ok(Hub { options, client })
    }

    /// What is wanted of a repository: from the cache if it is whole there, else downloaded.
    pub fn bring(&self, name: &HubName, wanted: &Wanted, tell: &mut Tell<'_>) -> Result<Snapshot> {
        match self.find(name, wanted)? {
            Some(found) => Ok(found),
            None => self.download(name, wanted, tell),
        }
    }

    /// The same, of what the server has now, whatever the cache knows.
    pub fn refresh(&self, name: &HubName, wanted: &Wanted, tell: &mut Tell<'_>) -> Result<Snapshot> {
        self.download(name, wanted, tell)
    }

    /// What the cache has, if that is all that is wanted.
    fn find(&self, name: &HubName, wanted: &Wanted) -> Result<Option<Snapshot>> {
        let repository = Repository::of(&self.options.cache, name);
        let Some(commit) = repository.commit_of(name.revision()) else { return Ok(None) };
        let root = repository.snapshot(&commit);
        let chosen = match repository.listing(&commit) {
            // What an old list does not hold, the server may have by now.
            Some(listing) => select::choose(name, wanted, &listing, &root)
                .ok()
                .and_then(|choice| choice.into_complete(&root)),
            None => select::found_without_list(name, wanted, &root),
        };
        Ok(chosen.map(|files| Snapshot::of(root, files, None)))
    }

    fn download(&self, name: &HubName, wanted: &Wanted, tell: &mut Tell<'_>) -> Result<Snapshot> {
        let repository = Repository::of(&self.options.cache, name);
        if self.options.network == Network::Offline {
            return self.without_network(name, wanted, &repository, None);
        }
        let mut patience = Patience::new(name, self.options.patience, tell);
        let listing = match self.client.listing(name, &mut patience) {
            Ok(listing) => listing,
            Err(error @ HubError::Unreachable { .. }) => {
                return self.without_network(name, wanted, &repository, Some(error));
            }
            Err(error) => return Err(error),
        };
        repository.note(name.revision(), &listing)?;
        self.download_listed(name, wanted, &repository, &listing, &mut patience)
    }

    fn download_listed(
        &self,
        name: &HubName,
        wanted: &Wanted,
        repository: &Repository,
        listing: &Listing,
        patience: &mut Patience<'_, '_>,
    ) -> Result<Snapshot> {
        let root = repository.snapshot(&listing.commit);
        // An index says which files belong to a model: it comes first, and the choice is made again.
        loop {
            let choice = select::choose(name, wanted, listing, &root)?;
            transfer::bring_all(&self.client, name, repository, listing, &choice.files, patience)?;
            if choice.is_final {
                let files = choice.files.iter().map(|file| file.path.clone()).collect();
                return Ok(Snapshot::of(root, files, None));
            }
        }
    }

    /// What the cache has, where no server can be asked and it is not known whether that is all.
    fn without_network(
        &self,
        name: &HubName,
        wanted: &Wanted,
        repository: &Repository,
        unreachable: Option<HubError>,
    ) -> Result<Snapshot> {
        if let Some(commit) = repository.commit_of(name.revision()) {
            let root = repository.snapshot(&commit);
            let found = match repository.listing(&commit) {
                Some(listing) => select::choose(name, wanted, &listing, &root)?.into_complete(&root),
                None => select::matching(name, wanted, &root),
            };
            if let Some(files) = found {
                let note = format!(
                    "{name}: as it lies in {}; the server was not asked whether that is all",
                    root.display()
                );
                return Ok(Snapshot::of(root, files, Some(note)));
            }
        }
        Err(HubError::absent(name, &self.options.cache, repository.root(), unreachable))
    }
}

impl Snapshot {
    fn of(root: PathBuf, files: Vec<String>, note: Option<String>) -> Snapshot {
        let files = files.into_iter().map(|file| root.join(file)).collect();
        Snapshot { root, files, note }
    }
}
