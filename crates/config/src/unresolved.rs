//! A configuration that was read but not yet resolved for a number of ranks.

use std::io::Read as _;
use std::num::NonZeroU64;
use std::path::Path;

use base64::Engine as _;
use base64::alphabet::URL_SAFE;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use serde_json::{Map, Value};

use crate::auto::{AutoValues, Filled, lookup, substitute};
use crate::batch::{self, BatchSizes, GivenBatchSizes};
use crate::check::{Checked, check};
use crate::compat::{Compat, Drifted, DriftedTo, drifted};
use crate::defaults::fill_root;
use crate::diagnostic::{Code, Diagnostic, Report, Severity};
use crate::elasticity::{ElasticBatch, Elasticity, ElasticityError, elastic_batch};
use crate::error::ConfigError;
use crate::overrides::set_in_tree;
use crate::reader::{Document, MAX_BYTES, MAX_DEPTH, shorten};
use crate::rules;
use crate::typed::{Config, Reader};

/// A configuration that was read and checked against the table. Its mistakes are in [`Unresolved::report`];
/// [`Unresolved::resolve`] adds those that depend on the number of ranks and refuses if there is any.
#[derive(Debug, Clone)]
pub struct Unresolved {
    document: Document,
    /// What the reader found: duplicate keys.
    reading: Report,
    checked: Checked,
    source: Value,
}

impl Config {
    /// Reads a file.
    pub fn from_path(path: impl AsRef<Path>) -> Result<Unresolved, ConfigError> {
        let path = path.as_ref();
        let unreadable = |source| ConfigError::Unreadable { path: path.to_owned(), source };
        let file = path.display().to_string();
        let mut bytes = Vec::new();
        let opened = ferrospeed_files::open(path).map_err(unreadable)?;
        opened.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        check_size(&file, bytes.len() as u64)?;
        Unresolved::from_bytes(&file, bytes)
    }

    /// Reads text; `name` stands for the file in messages.
    // `FromStr` has no place for the name.
    #[allow(clippy::should_implement_trait)]
    pub fn from_str(name: &str, text: &str) -> Result<Unresolved, ConfigError> {
        check_size(name, text.len() as u64)?;
        let (document, report) = Document::from_text(name, text).map_err(ConfigError::Invalid)?;
        Ok(Unresolved::from_document(document, report))
    }

    /// Takes a configuration that is in memory already.
    pub fn from_value(name: &str, value: &Value) -> Result<Unresolved, ConfigError> {
        let Some(document) = Document::from_value(name, value) else {
            let mut report = Report::default();
            report.push(Diagnostic {
                severity: Severity::Error,
                code: Code::Syntax,
                file: name.to_owned(),
                position: None,
                path: String::new(),
                why: format!("nested more than {MAX_DEPTH} levels deep"),
                help: String::new(),
            });
            return Err(ConfigError::Invalid(report));
        };
        Ok(Unresolved::from_document(document, Report::default()))
    }

    /// Reads URL-safe base64 of configuration text.
    pub fn from_base64(encoded: &str) -> Result<Unresolved, ConfigError> {
        let refuse = |why: String| ConfigError::NeitherFileNorBase64 { argument: shorten(encoded), why };
        check_size("base64", encoded.len() as u64 / 4 * 3)?;
        let padding = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
        let bytes = GeneralPurpose::new(&URL_SAFE, padding)
            .decode(encoded.trim())
            .map_err(|error| refuse(error.to_string()))?;
        let text =
            String::from_utf8(bytes).map_err(|_| refuse("it decodes to bytes that are no text".into()))?;
        Config::from_str("base64", &text)
    }

    /// Reads what a command line gave: the name of a file, or base64.
    pub fn from_argument(argument: &str) -> Result<Unresolved, ConfigError> {
        if Path::new(argument).exists() { Config::from_path(argument) } else { Config::from_base64(argument) }
    }
}

fn check_size(file: &str, bytes: u64) -> Result<(), ConfigError> {
    if bytes > MAX_BYTES {
        return Err(ConfigError::TooLarge { file: file.to_owned(), bytes, limit_bytes: MAX_BYTES });
    }
    Ok(())
}

impl Unresolved {
    fn from_bytes(file: &str, bytes: Vec<u8>) -> Result<Unresolved, ConfigError> {
        let text = String::from_utf8(bytes).map_err(|error| ConfigError::NotUtf8 {
            file: file.to_owned(),
            offset: error.utf8_error().valid_up_to(),
        })?;
        Config::from_str(file, &text)
    }

    fn from_document(document: Document, reading: Report) -> Unresolved {
        let checked = check(&document, reading.clone());
        Unresolved { checked, source: document.root.to_value(), document, reading }
    }

    /// Applies overrides such as `zero_optimization.stage=3` in their order, and checks the result anew. What is not
    /// overridden keeps its place in the file. Each follows the rules of [`crate::set`].
    pub fn with_overrides<S: AsRef<str>>(mut self, assignments: &[S]) -> Result<Unresolved, ConfigError> {
        for assignment in assignments {
            set_in_tree(&mut self.document.root, assignment.as_ref())?;
        }
        Ok(Unresolved::from_document(self.document, self.reading))
    }

    /// The configuration as it was given, comments left out.
    pub fn source(&self) -> &Value {
        &self.source
    }

    /// Everything that can be said without knowing the number of ranks.
    pub fn report(&self) -> Report {
        let mut report = self.checked.report.clone();
        let full = complete(&self.without_autos());
        report.extend(rules::check(&full, &self.checked.places));
        report.sort();
        report
    }

    /// The paths whose value is `"auto"`.
    pub fn autos(&self) -> impl Iterator<Item = &str> {
        self.checked.autos.iter().map(|(path, _)| path.as_str())
    }

    /// What takes the place of each `"auto"`, and where it comes from.
    pub fn filled(&self, auto: &AutoValues) -> Vec<Filled> {
        auto.fill(self.autos(), &complete(&self.without_autos()))
    }

    /// What the file gives for an option, by its canonical path: converted, and `"auto"` where that is written.
    pub fn given(&self, path: &str) -> Option<&Value> {
        lookup(&self.checked.given, path)
    }

    /// Whose defaults hold.
    pub fn compat(&self) -> Compat {
        Compat::of(&self.checked.given)
    }

    /// Where the meaning of the file depends on DeepSpeed's version: of what it does not give, defaults that have changed,
    /// unless it says whose hold; and what it gives that 0.19.8 refuses.
    pub fn drifted(&self) -> Vec<Drifted> {
        let chosen = self.checked.given.contains_key("compat");
        let mut found = drifted(&self.checked.given);
        found.retain(|drifted| !chosen || drifted.what == DriftedTo::Refused);
        found
    }

    fn without_autos(&self) -> Map<String, Value> {
        substitute(&self.checked, &AutoValues::new(), &mut Report::default())
    }

    /// Resolves `"auto"`, defaults and batch sizes for a number of data-parallel ranks (model replicas), and gives
    /// the configuration with its warnings. With any error, all of them are in [`ConfigError::Invalid`].
    pub fn resolve(
        &self,
        data_parallel_size: NonZeroU64,
        auto: &AutoValues,
    ) -> Result<(Config, Report), ConfigError> {
        let mut report = self.checked.report.clone();
        let given = self.retyped(auto, &mut report);
        let mut full = complete(&given);
        report.extend(rules::check(&full, &self.checked.places));
        let elasticity = read_elasticity(&full);
        let batch = match &elasticity {
            Some(elasticity) => self.elastic_sizes(elasticity, data_parallel_size, &mut report),
            None => self.batch_sizes(&full, data_parallel_size, &mut report),
        };
        report.sort();
        let (Some(batch), false) = (batch, report.has_errors()) else {
            return Err(ConfigError::Invalid(report));
        };
        full.insert("train_batch_size".into(), batch.train_batch_size.get().into());
        full.insert(
            "train_micro_batch_size_per_gpu".into(),
            batch.train_micro_batch_size_per_gpu.get().into(),
        );
        full.insert("gradient_accumulation_steps".into(), batch.gradient_accumulation_steps.get().into());
        if let Some(Value::Object(section)) = full.get_mut("elasticity").filter(|_| elasticity.is_some()) {
            // Written out, the chosen batch stands beside the section that chose it.
            section.insert("ignore_non_elastic_batch_info".into(), true.into());
        }
        match Config::build(full, batch, elasticity) {
            Ok(config) => Ok((config, report)),
            Err(why) => {
                report.push(self.checked.places.error(
                    Code::WrongType,
                    "",
                    why,
                    "this is a mistake in ferrospeed; please report it",
                ));
                Err(ConfigError::Invalid(report))
            }
        }
    }

    /// The given options with `"auto"` filled in; the filled-in values are checked like written ones.
    fn retyped(&self, auto: &AutoValues, report: &mut Report) -> Map<String, Value> {
        let given = substitute(&self.checked, auto, report);
        let filled = self.checked.autos.iter().any(|(path, _)| auto.get(path).is_some());
        let Some(document) =
            Document::from_value(&self.checked.places.file, &Value::Object(given.clone())).filter(|_| filled)
        else {
            return given;
        };
        let again = check(&document, Report::default());
        for error in again.report.errors() {
            report.push(Diagnostic { position: self.checked.places.find(&error.path), ..error.clone() });
        }
        again.given
    }

    /// The elastic batch of this configuration, for a total number of ranks if that is known.
    pub fn elastic_batch(
        &self,
        world_size: Option<u64>,
    ) -> Result<Result<ElasticBatch, ElasticityError>, ConfigError> {
        let mut report = self.report();
        let full = complete(&self.without_autos());
        match read_elasticity(&full) {
            Some(elasticity) if !report.has_errors() => Ok(elastic_batch(&elasticity, world_size)),
            Some(_) => Err(ConfigError::Invalid(report)),
            None => {
                let help = "add \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": …, \"micro_batch_sizes\": […]}";
                report.push(self.checked.places.error(
                    Code::Elasticity,
                    "elasticity",
                    "elasticity is not enabled",
                    help,
                ));
                Err(ConfigError::Invalid(report))
            }
        }
    }

    fn batch_sizes(
        &self,
        full: &Map<String, Value>,
        ranks: NonZeroU64,
        report: &mut Report,
    ) -> Option<BatchSizes> {
        let size = |name: &str| full.get(name).and_then(Value::as_u64).and_then(NonZeroU64::new);
        let given = GivenBatchSizes {
            train: size("train_batch_size"),
            micro: size("train_micro_batch_size_per_gpu"),
            accumulation: size("gradient_accumulation_steps"),
        };
        // A batch key with a mistake of its own has been reported; completing around it would only confuse.
        let batch_keys =
            ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"];
        if report.errors().any(|error| batch_keys.contains(&error.path.as_str())) {
            return None;
        }
        batch::complete(given, ranks)
            .map_err(|error| {
                let path = if given.train.is_some() { "train_batch_size" } else { "" };
                report.push(self.checked.places.error(
                    Code::BatchSize,
                    path,
                    error.to_string(),
                    error.help(),
                ));
            })
            .ok()
    }

    fn elastic_sizes(
        &self,
        elasticity: &Elasticity,
        replicas: NonZeroU64,
        report: &mut Report,
    ) -> Option<BatchSizes> {
        let world_size = replicas.get().saturating_mul(elasticity.model_parallel_size.max(1));
        let sizes = elastic_batch(elasticity, Some(world_size)).map(|elastic| {
            let micro = NonZeroU64::new(elastic.micro_batch_size?)?;
            let train = NonZeroU64::new(elastic.train_batch_size)?;
            batch::complete(
                GivenBatchSizes { train: Some(train), micro: Some(micro), accumulation: None },
                replicas,
            )
            .ok()
        });
        match sizes {
            Ok(sizes) => sizes,
            Err(error) => {
                report.push(self.checked.places.error(
                    Code::Elasticity,
                    "elasticity",
                    error.to_string(),
                    elastic_help(&error),
                ));
                None
            }
        }
    }
}

fn elastic_help(error: &ElasticityError) -> &'static str {
    match error {
        ElasticityError::IncompatibleWorldSize { .. } => "start one of these numbers of ranks",
        ElasticityError::WorldSizeUnknown => "start the run through the launcher",
        ElasticityError::SchedulerUnreadable(_) | ElasticityError::SchedulerDisagrees { .. } => {
            "give the scheduler and the run the same elasticity section"
        }
        ElasticityError::NodeNotDivisible { .. } => {
            "write a model_parallel_size that divides the ranks of a node"
        }
        ElasticityError::MicroBatchTooLarge { .. }
        | ElasticityError::NothingFits { .. }
        | ElasticityError::NoMicroBatch { .. } => {
            "write a larger max_train_batch_size or smaller micro_batch_sizes"
        }
    }
}

fn read_elasticity(full: &Map<String, Value>) -> Option<Elasticity> {
    if lookup(full, "elasticity.enabled") != Some(&Value::Bool(true)) {
        return None;
    }
    let version = rules::elasticity_version(full)?;
    let mut section = full.get("elasticity")?.clone();
    section["version"] = version.into();
    Reader(&Map::from_iter([("elasticity".to_owned(), section)])).get("elasticity").ok()
}

/// Fills in the defaults and the values that follow from others.
fn complete(given: &Map<String, Value>) -> Map<String, Value> {
    let mut given = given.clone();
    if let Some(Value::Bool(on)) = given.get("zero_optimization") {
        let size = given.get("allgather_size").cloned().unwrap_or(500_000_000.into());
        let section = serde_json::json!({ "stage": u8::from(*on), "allgather_bucket_size": size });
        given.insert("zero_optimization".into(), section);
    }
    let mut full = fill_root(&given);
    if let Some(Value::Object(zero)) = full.get_mut("zero_optimization")
        && zero.get("overlap_comm").is_none_or(Value::is_null)
    {
        let stage_3 = zero.get("stage").and_then(Value::as_i64) == Some(3);
        zero.insert("overlap_comm".into(), stage_3.into());
    }
    if lookup(&full, "flops_profiler.enabled") == Some(&Value::Bool(true)) {
        full.insert("wall_clock_breakdown".into(), true.into());
    }
    full
}
