//! Names of repositories: `org/name`, `org/name@revision`, `hf://datasets/org/name@revision/path`.
//!
//! `hf://…` is how Hugging Face writes them where a file's name could stand (`huggingface_hub`'s file system); the short form is what
//! people say. A name says which files of a repository are meant, if not all that belong to its kind, by a path in which `*` stands
//! for anything.

use std::fmt;
use std::path::{Component, Path};

use crate::error::{HubError, Result};

/// What a repository holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RepoKind {
    /// A model.
    Model,
    /// Data.
    Dataset,
}

/// A repository, one of its revisions, and perhaps which of its files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubName {
    kind: RepoKind,
    repository: String,
    revision: String,
    path: Option<String>,
}

/// How names begin that can be nothing else.
const SCHEME: &str = "hf://";
/// What is taken where no revision is given.
const MAIN: &str = "main";
/// As the Hub has it.
const MAX_NAME_BYTES: usize = 96;
/// Of a hash that names a commit.
const COMMIT_DIGITS: usize = 40;

impl HubName {
    /// Reads a name; `kind` is meant where it does not say so itself.
    pub fn parse(text: &str, kind: RepoKind) -> Result<HubName> {
        let wrong = |why: &str| HubError::Name { text: text.to_owned(), why: why.to_owned() };
        let stripped = text.strip_prefix(SCHEME);
        let (kind, rest) = match stripped.and_then(|rest| rest.split_once('/')) {
            Some(("datasets", rest)) => (RepoKind::Dataset, rest),
            Some(("models", rest)) => (RepoKind::Model, rest),
            _ => (if stripped.is_some() { RepoKind::Model } else { kind }, stripped.unwrap_or(text)),
        };
        let (org, rest) = rest.split_once('/').ok_or_else(|| wrong("is not org/name"))?;
        let end = rest.find(['/', '@']).unwrap_or(rest.len());
        let (name, rest) = rest.split_at(end);
        if !is_word(org) || !is_word(name) {
            return Err(wrong("is not org/name in letters, digits, '-', '_' and '.'"));
        }
        let (revision, path) = match rest.strip_prefix('@') {
            None => (MAIN, rest.strip_prefix('/')),
            // A reference of the server has slashes of its own: refs/pr/1, refs/convert/parquet.
            Some(rest) if rest.starts_with("refs/") => {
                let end = rest.match_indices('/').nth(2).map_or(rest.len(), |(at, _)| at);
                (&rest[..end], rest[end..].strip_prefix('/'))
            }
            Some(rest) => {
                rest.split_once('/').map_or((rest, None), |(revision, path)| (revision, Some(path)))
            }
        };
        if !is_plain_path(revision) {
            return Err(wrong("has no revision behind '@', such as a branch, a tag or a commit"));
        }
        let path = path.filter(|path| !path.is_empty());
        if path.is_some_and(|path| !is_plain_path(path)) {
            return Err(wrong("names no path inside a repository"));
        }
        Ok(HubName {
            kind,
            repository: format!("{org}/{name}"),
            revision: revision.to_owned(),
            path: path.map(str::to_owned),
        })
    }

    /// The model that is meant where a folder could be named as well: there is none of that name here, nor one that it would lie in.
    pub fn of_model(path: &Path) -> Option<Result<HubName>> {
        let text = path.to_str()?;
        if text.starts_with(SCHEME) {
            return Some(HubName::parse(text, RepoKind::Model));
        }
        let Some(Component::Normal(first)) = path.components().next() else { return None };
        if path.symlink_metadata().is_ok() || Path::new(first).exists() {
            return None;
        }
        let name = HubName::parse(text, RepoKind::Model).ok()?;
        // Three names and more are a path; a file of quantised weights is named behind its repository.
        name.path.as_ref().is_none_or(|path| is_gguf(path)).then_some(Ok(name))
    }

    /// The name of what lies in the cache, its commit included: the same on every machine.
    pub fn of_cached(path: &Path) -> Option<HubName> {
        let parts: Option<Vec<&str>> =
            path.components().map(|component| component.as_os_str().to_str()).collect();
        let parts = parts?;
        let at = parts.windows(2).position(|pair| pair[1] == "snapshots" && pair[0].contains("--"))?;
        let (kind, repository) = match parts[at].split_once("--")? {
            ("models", repository) => (RepoKind::Model, repository),
            ("datasets", repository) => (RepoKind::Dataset, repository),
            _ => return None,
        };
        let commit = parts.get(at + 2).filter(|commit| is_commit(commit))?;
        let path = parts[at + 3..].join("/");
        let (org, name) = repository.split_once("--")?;
        Some(HubName {
            kind,
            repository: format!("{org}/{name}"),
            revision: (*commit).to_owned(),
            path: (!path.is_empty()).then_some(path),
        })
    }

    /// Whether a text can be nothing but the name of a repository.
    pub fn is_certain(text: &str) -> bool {
        text.starts_with(SCHEME)
    }

    /// What it holds.
    pub fn kind(&self) -> RepoKind {
        self.kind
    }

    /// `org/name`.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// A branch, a tag or a commit.
    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Which files are meant.
    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }

    /// As it is written where a file could stand, too.
    pub fn with_scheme(&self) -> String {
        let kind = if self.kind == RepoKind::Dataset { "datasets/" } else { "" };
        format!("{SCHEME}{kind}{self}")
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.repository)?;
        if self.revision != MAIN {
            write!(out, "@{}", self.revision)?;
        }
        self.path.iter().try_for_each(|path| write!(out, "/{path}"))
    }
}

/// Whether a revision is a commit, which never changes.
pub(crate) fn is_commit(text: &str) -> bool {
    text.len() == COMMIT_DIGITS && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether a file holds a model in few bits per weight.
pub(crate) fn is_gguf(path: &str) -> bool {
    path.to_ascii_lowercase().ends_with(".gguf")
}

/// Whether a path leads nowhere but down: it comes from a server, and becomes one of this machine.
pub(crate) fn is_plain_path(path: &str) -> bool {
    let is_plain = |part: &str| !matches!(part, "" | "." | "..") && !part.contains(['\\', '\0']);
    path.len() <= 1024 && path.split('/').all(is_plain)
}

fn is_word(text: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=MAX_NAME_BYTES).contains(&text.len())
        && text.bytes().all(known)
        && !text.starts_with(['.', '-'])
        && !text.contains("..")
        && !text.contains("--")
}
