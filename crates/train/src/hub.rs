//! What a recipe names of the Hugging Face Hub: brought here before anything else looks at it.
//!
//! `model.path = "org/name"`, `data.hub = "org/name"`, `data.tokenizer = "org/name"`, and `hf://…` wherever a file could stand. Afterwards
//! the recipe names folders and files of the Hub's cache. It is written down again with names, and with the commit that each of them was:
//! so it means the same on another machine, whose cache lies elsewhere, and when the repository has moved on.

use std::path::{Path, PathBuf};

use ferrospeed_hub::{Hub, HubError, HubName, RepoKind, Snapshot, Tell, Wanted};
use serde::Serializer;

use crate::error::{Result, TrainError};
use crate::recipe::{DataRecipe, Recipe, ValidationRecipe};

/// What of a recipe's names is brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FromHub {
    /// All: the run is to begin.
    Everything,
    /// What says how the model is built: weights and data are not looked at.
    ModelConfig,
}

/// The Hub, opened when the first name needs it, and what was wrong with names so far.
struct Porter<'a, 'b> {
    hub: Option<Hub>,
    tell: &'a mut Tell<'b>,
    recipe: PathBuf,
    problems: Vec<String>,
    notes: Vec<String>,
}

impl Recipe {
    /// Brings what the recipe names of the Hub, and puts where it lies in place of the names. `path` is what messages call the recipe.
    /// Gives what is worth knowing.
    pub fn bring(&mut self, path: &Path, what: FromHub, tell: &mut Tell<'_>) -> Result<Vec<String>> {
        let recipe = path.to_path_buf();
        let mut porter = Porter { hub: None, tell, recipe, problems: Vec::new(), notes: Vec::new() };
        let of_model = match what {
            FromHub::Everything => Wanted::Model,
            FromHub::ModelConfig => Wanted::Config,
        };
        porter.place("model.path", &mut self.model.path, &of_model)?;
        porter.place("model.config", &mut self.model.config, &Wanted::Config)?;
        if let Some(adapter) = &mut self.adapter {
            porter.place("adapter.path", &mut adapter.path, &Wanted::Model)?;
        }
        porter.tokenizer(&mut self.data)?;
        if what == FromHub::Everything {
            porter.data(&mut self.data)?;
        }
        match porter.problems.is_empty() {
            true => Ok(porter.notes),
            false => Err(TrainError::Recipe { path: porter.recipe, problems: porter.problems }),
        }
    }
}

impl Porter<'_, '_> {
    /// A folder or file where a model could be named.
    fn place(&mut self, key: &str, place: &mut Option<PathBuf>, wanted: &Wanted) -> Result<()> {
        let Some(named) = place.as_deref().and_then(HubName::of_model) else { return Ok(()) };
        if let Some(found) = self.bring(key, named, wanted)? {
            let only =
                if *wanted == Wanted::Config && key != "model.path" { found.files.first() } else { None };
            let file = named_file(place.as_deref(), &found);
            *place = Some(only.cloned().or(file).unwrap_or(found.root));
        }
        Ok(())
    }

    fn data(&mut self, data: &mut DataRecipe) -> Result<()> {
        if let Some(name) = data.hub.clone() {
            let named = HubName::parse(&name, RepoKind::Dataset);
            if let Some(found) = self.bring("data.hub", named, &Wanted::Data)? {
                let list = list_for(data, &found.files);
                // Both are one too many, which is told with what else is wrong.
                if list.is_none() {
                    *list = Some(found.files);
                    data.hub = None;
                }
            }
        }
        let lists = [
            ("data.text", &mut data.text),
            ("data.jsonl", &mut data.jsonl),
            ("data.parquet", &mut data.parquet),
            ("data.samples", &mut data.samples),
        ];
        for (key, list) in lists {
            if let Some(list) = list {
                self.list(key, list)?;
            }
        }
        match &mut data.validation {
            ValidationRecipe::Files(list) => self.list("data.validation", list),
            ValidationRecipe::Share(_) => Ok(()),
        }
    }

    fn tokenizer(&mut self, data: &mut DataRecipe) -> Result<()> {
        let Some(tokenizer) = &data.tokenizer else { return Ok(()) };
        let Some(named) = HubName::of_model(Path::new(tokenizer)) else { return Ok(()) };
        if let Some(found) = self.bring("data.tokenizer", named, &Wanted::Tokenizer)? {
            data.tokenizer = Some(found.root.join("tokenizer.json").display().to_string());
        }
        Ok(())
    }

    /// Files, among which `hf://…` may stand.
    fn list(&mut self, key: &str, list: &mut Vec<PathBuf>) -> Result<()> {
        let is_named = |path: &PathBuf| path.to_str().is_some_and(HubName::is_certain);
        if !list.iter().any(is_named) {
            return Ok(());
        }
        let mut brought = Vec::with_capacity(list.len());
        for path in list.drain(..) {
            match path.to_str().filter(|text| HubName::is_certain(text)) {
                None => brought.push(path),
                Some(text) => {
                    let found = self.bring(key, HubName::parse(text, RepoKind::Dataset), &Wanted::Data)?;
                    brought.extend(found.into_iter().flat_map(|found| found.files));
                }
            }
        }
        *list = brought;
        Ok(())
    }

    /// What a name means. A name that is wrong is one of the recipe's problems; a server that does not answer ends it.
    fn bring(
        &mut self,
        key: &str,
        named: Result<HubName, HubError>,
        wanted: &Wanted,
    ) -> Result<Option<Snapshot>> {
        let hub = match self.hub.take().map_or_else(Hub::from_environment, Ok) {
            Ok(hub) => self.hub.insert(hub),
            Err(error) => return Err(self.failure(key, error)),
        };
        match named.and_then(|name| hub.bring(&name, wanted, self.tell)) {
            Ok(found) => {
                self.notes.extend(found.note.iter().map(|note| format!("{key}: {note}")));
                Ok(Some(found))
            }
            Err(error @ (HubError::Name { .. } | HubError::Refused { .. } | HubError::Unsuitable { .. })) => {
                self.problems.push(format!("{key}: {error}"));
                Ok(None)
            }
            Err(error) => Err(self.failure(key, error)),
        }
    }

    fn failure(&self, key: &str, source: HubError) -> TrainError {
        TrainError::Hub { path: self.recipe.clone(), key: key.to_owned(), source }
    }
}

/// The list that data of the Hub belongs to: what is said of it tells, else what it is.
fn list_for<'a>(data: &'a mut DataRecipe, files: &[PathBuf]) -> &'a mut Option<Vec<PathBuf>> {
    let is_text =
        |file: &PathBuf| file.extension().is_some_and(|extension| extension == "txt" || extension == "md");
    if data.column.is_some() {
        &mut data.parquet
    } else if data.field.is_some() {
        &mut data.jsonl
    } else if files.iter().all(is_text) {
        &mut data.text
    } else {
        &mut data.samples
    }
}

/// The file, where a name was of one.
fn named_file(place: Option<&Path>, found: &Snapshot) -> Option<PathBuf> {
    let name = place.and_then(HubName::of_model)?.ok()?;
    name.path().and(found.files.first()).cloned()
}

/// How a place is written down: by its name, if it is one of the Hub's cache.
fn written(path: &Path) -> PathBuf {
    HubName::of_cached(path).map_or_else(|| path.to_path_buf(), |name| PathBuf::from(name.with_scheme()))
}

pub(crate) fn write_path<S: Serializer>(path: &Option<PathBuf>, to: S) -> Result<S::Ok, S::Error> {
    serde::Serialize::serialize(&path.as_deref().map(written), to)
}

pub(crate) fn write_paths<S: Serializer>(paths: &Option<Vec<PathBuf>>, to: S) -> Result<S::Ok, S::Error> {
    let paths = paths.as_ref().map(|paths| paths.iter().map(|path| written(path)).collect::<Vec<_>>());
    serde::Serialize::serialize(&paths, to)
}

pub(crate) fn write_list<S: Serializer>(paths: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
    to.collect_seq(paths.iter().map(|path| written(path)))
}

pub(crate) fn write_text<S: Serializer>(text: &Option<String>, to: S) -> Result<S::Ok, S::Error> {
    let folder = text.as_deref().map(Path::new);
    // Of a tokenizer its repository is named, in which it is found again.
    let name = folder.and_then(|file| HubName::of_cached(file.parent()?)).map(|name| name.with_scheme());
    serde::Serialize::serialize(&name.as_ref().or(text.as_ref()), to)
}
