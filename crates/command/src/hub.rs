//! Models that are named, not shown: a folder or file here, a run's folder, or a name on the Hugging Face Hub, which is brought.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use ferrospeed_hub::{Hub, HubError, Phase, Progress, Snapshot};
pub use ferrospeed_hub::{HubName, RepoKind, Wanted};
use serde_json::Value;

use crate::Failure;
use crate::terminal::{print_line, print_note};

/// The model of a command: its first word, or `--model`.
#[derive(Debug, Args)]
pub struct NamedModel {
    /// The model: a directory with config.json and weights, a run's folder, a GGUF file, a directory with an adapter, or a name on the
    /// Hugging Face Hub (org/name, org/name@revision)
    #[arg(value_name = "MODEL", required_unless_present = "model_option")]
    model: Option<PathBuf>,
    /// The same, as an option
    #[arg(long = "model", id = "model_option", value_name = "MODEL", conflicts_with = "model")]
    model_option: Option<PathBuf>,
}

impl NamedModel {
    /// As it was given.
    pub fn given(&self) -> &Path {
        self.model.as_deref().or(self.model_option.as_deref()).unwrap_or(Path::new(""))
    }

    /// What it is called where its folder's name says nothing: on the Hub that is a commit, in a run's folder `model`.
    pub fn name(&self) -> Option<String> {
        let given = self.given();
        match HubName::of_model(given) {
            Some(name) => name.ok().map(|name| name.to_string()),
            None if within_run(given) != given => Some(given.file_name()?.to_str()?.to_owned()),
            None => None,
        }
    }

    /// Where it lies.
    pub fn place(&self) -> Result<PathBuf, Failure> {
        model_at(self.given())
    }
}

/// Where a model lies that was named: here, or brought from the Hub.
pub fn model_at(named: &Path) -> Result<PathBuf, Failure> {
    model_place(named, &Wanted::Model)
}

/// The same where only its configuration is read.
pub fn config_at(named: &Path) -> Result<PathBuf, Failure> {
    model_place(named, &Wanted::Config)
}

fn model_place(named: &Path, wanted: &Wanted) -> Result<PathBuf, Failure> {
    brought(named, wanted).map(|place| within_run(&place))
}

/// What was named, brought if it is a name on the Hub, else as it is.
pub fn brought(named: &Path, wanted: &Wanted) -> Result<PathBuf, Failure> {
    let Some(name) = HubName::of_model(named) else { return Ok(named.to_path_buf()) };
    let name = name.map_err(failure)?;
    let found = bring(&name, wanted, Freshness::AsInCache)?;
    Ok(match (name.path(), found.files.first()) {
        (Some(_), Some(file)) => file.clone(),
        _ => found.root,
    })
}

/// The base model of an adapter, where the adapter names one of the Hub and nothing else was said.
pub fn base_at(adapter: &Path, said: Option<&Path>) -> Result<Option<PathBuf>, Failure> {
    if let Some(said) = said {
        return model_at(said).map(Some);
    }
    const MAX_BYTES: u64 = 1 << 20;
    let config = ferrospeed_files::read(adapter.join("adapter_config.json"), MAX_BYTES).ok();
    let config: Option<Value> = config.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    let base = config.as_ref().and_then(|config| config["base_model_name_or_path"].as_str());
    match base.and_then(|base| HubName::of_model(Path::new(base))) {
        Some(Ok(name)) => bring(&name, &Wanted::Model, Freshness::AsInCache).map(|found| Some(found.root)),
        _ => Ok(None),
    }
}

/// Which state of a repository is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freshness {
    /// What the cache has, if it has it whole.
    AsInCache,
    /// What the server has now.
    AsOnServer,
}

/// Brings what is wanted of a repository, and says how far it is.
pub fn bring(name: &HubName, wanted: &Wanted, freshness: Freshness) -> Result<Snapshot, Failure> {
    let hub = Hub::from_environment().map_err(failure)?;
    let mut teller = Teller::new();
    let mut tell = |progress: &Progress<'_>| {
        teller.tell(progress);
        ControlFlow::Continue(())
    };
    let found = match freshness {
        Freshness::AsInCache => hub.bring(name, wanted, &mut tell),
        Freshness::AsOnServer => hub.refresh(name, wanted, &mut tell),
    };
    let found = found.map_err(failure)?;
    found.note.iter().for_each(|note| print_note(note));
    Ok(found)
}

/// A name as the words of a command give it.
pub fn parse(text: &str, kind: RepoKind) -> Result<HubName, Failure> {
    HubName::parse(text, kind).map_err(failure)
}

/// A run's folder stands for the model in it.
fn within_run(named: &Path) -> PathBuf {
    let own = named.join("model");
    let is_model =
        |folder: &Path| ["config.json", "adapter_config.json"].iter().any(|name| folder.join(name).is_file());
    if !is_model(named) && is_model(&own) { own } else { named.to_path_buf() }
}

/// A mistake of the user, or a server or disk that failed.
fn failure(error: HubError) -> Failure {
    match error {
        HubError::Name { .. }
        | HubError::Setting { .. }
        | HubError::Refused { .. }
        | HubError::Unsuitable { .. } => Failure::Usage(error.to_string()),
        error => Failure::Run(error.to_string()),
    }
}

/// Says how far a download is: when it begins, every tenth of it, and not more often than somebody reads.
#[derive(Debug)]
pub struct Teller {
    tenths: Option<u64>,
    told: Instant,
    phase: Option<Phase>,
    /// The silence that was told last.
    silent: Duration,
}

impl Default for Teller {
    fn default() -> Teller {
        Teller::new()
    }
}

impl Teller {
    /// Nothing has been said.
    pub fn new() -> Teller {
        Teller { tenths: None, told: Instant::now(), phase: None, silent: Duration::ZERO }
    }

    /// Says it, if it is news.
    pub fn tell(&mut self, progress: &Progress<'_>) {
        /// What is here sooner is not worth a line.
        const WORTH_TELLING_BYTES: u64 = 8 << 20;
        const LINES_APART: Duration = Duration::from_secs(2);
        /// A silence that is told; the next when it has become twice as long.
        const LONG: Duration = Duration::from_secs(10);
        let Progress { repository, file, phase, bytes, total_bytes } = *progress;
        let before = self.phase.replace(phase);
        match phase {
            Phase::Receiving => self.silent = Duration::ZERO,
            Phase::Waiting { process } => {
                self.silent = Duration::ZERO;
                if !matches!(before, Some(Phase::Waiting { .. })) {
                    let process = process.map_or(String::new(), |id| format!(" ({id})"));
                    print_line(&format!(
                        "{repository}: another process{process} downloads {file}; waiting for it"
                    ));
                }
                return;
            }
            Phase::Silent { waited, limit } => {
                if waited >= (self.silent * 2).max(LONG) {
                    self.silent = waited;
                    print_line(&format!(
                        "{repository}: the server has sent nothing new of {file} for {} s; it is given up after {} s",
                        waited.as_secs(),
                        limit.as_secs()
                    ));
                }
                return;
            }
        }
        if total_bytes < WORTH_TELLING_BYTES {
            return;
        }
        let tenths = bytes.saturating_mul(10) / total_bytes.max(1);
        let is_news = match self.tenths {
            None => true,
            Some(told) => tenths > told && (self.told.elapsed() >= LINES_APART || bytes == total_bytes),
        };
        if is_news {
            (self.tenths, self.told) = (Some(tenths), Instant::now());
            print_line(&format!(
                "{repository}: {} of {} MiB from the Hub ({} %), {file}",
                bytes >> 20,
                total_bytes.div_ceil(1 << 20),
                bytes.saturating_mul(100) / total_bytes.max(1)
            ));
        }
    }
}
