//! `ferrospeed checkpoint`: look at checkpoints, check them, and carry them to and from DeepSpeed and Hugging Face.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use ferrospeed_checkpoint::deepspeed::{
    ExportOptions, Fp32Weights, PipelineFiles, Spelling, export_deepspeed, export_pipeline, export_universal,
    import_deepspeed, import_universal, is_universal,
};
use ferrospeed_checkpoint::pt::{TensorTable, Unknown, Value, write_pt};
use ferrospeed_checkpoint::{
    Checkpoint, CheckpointError, Disk, Dtype, Kind, Manifest, Retention, Target, TensorEntry, resolve,
};
use ferrospeed_models::ModelError;
use ferrospeed_models::directory::{GENERATION_FILES, TOKENIZER_FILES, copy_files, set_dtype, write_config};
use ferrospeed_models::weights::{TensorToWrite, write_directory, write_file};
use ferrospeed_tensor::DType;

use crate::failure::Failure;
use crate::terminal;

#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

/// Which checkpoint of a folder.
#[derive(Debug, Args)]
struct Which {
    /// The folder that holds checkpoints, or one checkpoint's own
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The checkpoint's name; without, the one that `latest` names, or the newest
    #[arg(long, short)]
    tag: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum WeightType {
    F32,
    Bf16,
    F16,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Say what a checkpoint holds
    Inspect {
        #[command(flatten)]
        which: Which,
        /// Print the manifest as JSON
        #[arg(long)]
        json: bool,
        /// List every tensor
        #[arg(long)]
        tensors: bool,
    },
    /// Read everything and compare every checksum
    Verify {
        #[command(flatten)]
        which: Which,
    },
    /// Write the f32 weights of a checkpoint, ours or DeepSpeed's, into one file
    ToFp32 {
        #[command(flatten)]
        which: Which,
        /// A safetensors file if it is called so, else a torch file
        output: PathBuf,
        /// Replace the file, if it is there
        #[arg(long)]
        overwrite: bool,
        /// Leave out parameters that are not trained
        #[arg(long, alias = "exclude_frozen_parameters")]
        exclude_frozen_parameters: bool,
        /// Keep objects of unknown classes in torch files as inert data instead of refusing them
        #[arg(long)]
        allow_unknown_objects: bool,
    },
    /// Write the weights as a Hugging Face model directory, with config.json and tokenizer where a recipe's run wrote the checkpoint
    ExportHf {
        #[command(flatten)]
        which: Which,
        /// The model directory
        output: PathBuf,
        /// The type of the weights
        #[arg(long, value_enum, default_value = "bf16")]
        dtype: WeightType,
        /// The largest file
        #[arg(long, value_name = "BYTES", default_value_t = 5_000_000_000)]
        max_shard_bytes: usize,
    },
    /// Make a checkpoint of ours from one of DeepSpeed (ZeRO 0 to 3, BF16, or universal)
    ImportDeepspeed {
        #[command(flatten)]
        which: Which,
        /// The folder for the new checkpoint
        output: PathBuf,
        /// Keep objects of unknown classes in torch files as inert data instead of refusing them
        #[arg(long)]
        allow_unknown_objects: bool,
    },
    /// Write a checkpoint in DeepSpeed's layout
    ExportDeepspeed {
        #[command(flatten)]
        which: Which,
        /// The folder for the new checkpoint
        output: PathBuf,
        /// The ZeRO stage of the files [default: 2, or 1 for a pipeline, whose may be 0 too]
        #[arg(long, value_parser = clap::value_parser!(u8).range(0..=3))]
        stage: Option<u8>,
        /// For how many ranks
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1 << 16))]
        ranks: u64,
        /// Over how many of them the experts of a mixture are spread
        #[arg(long = "ep", value_name = "RANKS", default_value_t = 1)]
        expert_ranks: u64,
        /// Write the files of a pipeline (--ranks for each stage) for a model whose names begin with the numbers of its
        /// layers: where stages begin, and behind the last layer; 0,3,6 makes two stages of three layers
        #[arg(long, value_name = "LAYERS", value_delimiter = ',', conflicts_with = "expert_ranks")]
        pipeline: Vec<u64>,
        /// For how many slices of each layer of a pipeline, cut as the checkpoint was saved or imported
        #[arg(long = "tp", value_name = "SLICES", default_value_t = 1, requires = "pipeline",
              value_parser = clap::value_parser!(u64).range(1..=1 << 10))]
        slices: u64,
        /// Layers of a pipeline that share the parameters of the first of them, where the checkpoint does not know: 0,5
        #[arg(long, value_name = "LAYERS", requires = "pipeline")]
        tied: Vec<TiedLayers>,
        /// By which names parameters are called; transformers 5 has others in memory than in files (GPT-NeoX's head, experts)
        #[arg(long, value_enum, default_value = "files")]
        names: Names,
    },
    /// Write a checkpoint in DeepSpeed's universal layout
    ToUniversal {
        #[command(flatten)]
        which: Which,
        /// The folder for the new checkpoint
        output: PathBuf,
        /// By which names parameters are called
        #[arg(long, value_enum, default_value = "files")]
        names: Names,
    },
    /// Compare two checkpoints tensor by tensor; exit code 0 when they are the same, 1 when they differ, 2 on trouble
    Diff {
        /// One checkpoint's own folder, or one that holds checkpoints, of which the one that `latest` names is taken
        first: PathBuf,
        /// The other's
        second: PathBuf,
    },
}

/// Numbers of layers, in one word.
#[derive(Debug, Clone)]
struct TiedLayers(Vec<u64>);

impl std::str::FromStr for TiedLayers {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<TiedLayers, Self::Err> {
        text.split(',').map(str::parse).collect::<Result<_, _>>().map(TiedLayers)
    }
}

/// The names in DeepSpeed's files.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Names {
    /// Those of weight files, which transformers 4 has in memory too
    Files,
    /// Those that transformers 5 has in memory
    Transformers5,
}

impl Names {
    fn spelling(self) -> Spelling {
        match self {
            Names::Files => Spelling::Files,
            Names::Transformers5 => Spelling::Transformers5,
        }
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Failure {
        match error {
            CheckpointError::NotFound { .. } | CheckpointError::Tag { .. } | CheckpointError::Export(_) => {
                Failure::Usage(error.to_string())
            }
            other => Failure::Run(other.to_string()),
        }
    }
}

pub(crate) fn run(args: &CheckpointArgs) -> Result<ExitCode, Failure> {
    match &args.action {
        Action::Inspect { which, json, tensors } => inspect(which, *json, *tensors)?,
        Action::Verify { which } => {
            let checkpoint = open(which)?;
            let verified = checkpoint.verify()?;
            let path = checkpoint.path().display();
            terminal::print_output(&format!(
                "{path}: whole ({} tensors in {} files, {} bytes)\n",
                verified.tensors, verified.files, verified.bytes
            ))?;
        }
        Action::ToFp32 { which, output, overwrite, exclude_frozen_parameters, allow_unknown_objects } => {
            if output.exists() && !overwrite {
                let why = "is already there; --overwrite replaces it";
                return Err(Failure::Usage(format!("{} {why}", output.display())));
            }
            to_fp32(which, output, *exclude_frozen_parameters, unknown(*allow_unknown_objects))?;
        }
        Action::ExportHf { which, output, dtype, max_shard_bytes } => {
            export_hf(which, output, *dtype, *max_shard_bytes)?;
        }
        Action::ImportDeepspeed { which, output, allow_unknown_objects } => {
            import(which, output, unknown(*allow_unknown_objects))?;
        }
        Action::ExportDeepspeed { which, output, stage, ranks, pipeline, slices, tied, .. }
            if !pipeline.is_empty() =>
        {
            let tied = tied.iter().map(|layers| layers.0.clone()).collect::<Vec<_>>();
            let zero_stage = stage.unwrap_or(1);
            let files = PipelineFiles {
                boundaries: pipeline,
                ranks: *ranks,
                slices: *slices,
                tied: &tied,
                zero_stage,
            };
            export_pipeline(&open(which)?, output, files)?;
        }
        Action::ExportDeepspeed { which, output, stage, ranks, expert_ranks, names, .. } => {
            let options = ExportOptions {
                stage: stage.unwrap_or(2),
                ranks: *ranks,
                expert_ranks: *expert_ranks,
                spelling: names.spelling(),
            };
            export_deepspeed(&open(which)?, output, options)?;
        }
        Action::ToUniversal { which, output, names } => {
            export_universal(&open(which)?, output, names.spelling())?;
        }
        // As diff(1): what could not be compared does not differ.
        Action::Diff { first, second } => {
            return diff(first, second).map_err(|failure| Failure::Usage(failure.to_string()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn unknown(allowed: bool) -> Unknown {
    if allowed { Unknown::Keep } else { Unknown::Refuse }
}

fn open(which: &Which) -> Result<Checkpoint, CheckpointError> {
    Checkpoint::open(&resolve(&which.dir, which.tag.as_deref())?)
}

fn inspect(which: &Which, json: bool, tensors: bool) -> Result<(), Failure> {
    let checkpoint = open(which)?;
    let manifest = checkpoint.manifest();
    if json {
        let text = serde_json::to_string_pretty(manifest).map_err(|error| Failure::Run(error.to_string()))?;
        return terminal::print_output(&(text + "\n"));
    }
    let mut text = summary(&checkpoint, manifest);
    for tensor in manifest.tensors.iter().filter(|_| tensors) {
        let pieces = tensor.pieces.len();
        let _ = writeln!(
            text,
            "  {:<18} {:?} {:?} {} in {pieces} pieces",
            tensor.kind.to_string(),
            tensor.dtype,
            tensor.shape,
            tensor.name
        );
    }
    terminal::print_output(&text)
}

fn summary(checkpoint: &Checkpoint, manifest: &Manifest) -> String {
    let (origin, training) = (&manifest.origin, &manifest.training);
    let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    let weights = manifest.tensors.iter().filter(|tensor| matches!(tensor.kind, Kind::Master | Kind::Weight));
    let params: u64 = weights.map(|tensor| tensor.numel()).sum();
    let rates: Vec<f64> = training.groups.iter().map(|group| group.lr).collect();
    let mut text = String::new();
    let mut line = |what: &str, value: String| {
        // Writing to a string does not fail.
        let _ = writeln!(text, "{what:<16} {value}");
    };
    line("checkpoint", checkpoint.path().display().to_string());
    line("parameters", params.to_string());
    line("bytes", format!("{bytes} in {} files", manifest.files.len()));
    line("written by", format!("{} ranks, ZeRO stage {}, {:?}", origin.ranks, origin.stage, origin.dtype));
    // AdamW and Adam are one rule, which the origin names; the configuration has the user's word.
    let optimizer = manifest.config["optimizer"]["type"].as_str().or(origin.optimizer.as_deref());
    line("optimizer", optimizer.unwrap_or("none").to_owned());
    line("steps", format!("{} ({} skipped)", training.global_steps, training.skipped_steps));
    line("samples", training.global_samples.to_string());
    line("learning rates", format!("{rates:?}"));
    line("client state", manifest.client_state.to_string());
    text
}

/// Weights of either kind of checkpoint, one tensor at a time.
enum Weights {
    Ours(Box<Checkpoint>, bool),
    DeepSpeed(Fp32Weights),
}

/// A tensor's name, shape and stored type.
type Listed = (String, Vec<u64>, Dtype);

impl Weights {
    fn open(which: &Which, exclude_frozen: bool, unknown: Unknown) -> Result<Weights, CheckpointError> {
        match open(which) {
            Ok(checkpoint) => Ok(Weights::Ours(Box::new(checkpoint), exclude_frozen)),
            Err(CheckpointError::NotFound { .. }) => Ok(Weights::DeepSpeed(Fp32Weights::open(
                &which.dir,
                which.tag.as_deref(),
                exclude_frozen,
                unknown,
            )?)),
            Err(other) => Err(other),
        }
    }

    /// Every tensor; tied ones under all of their names, or under one.
    fn list(&self, with_aliases: bool) -> Vec<Listed> {
        match self {
            Weights::Ours(checkpoint, exclude_frozen) => {
                let tensors = checkpoint.manifest().tensors.iter().filter(|tensor| match tensor.kind {
                    Kind::Master | Kind::Buffer => true,
                    Kind::Weight => !exclude_frozen,
                    Kind::State(_) => false,
                });
                let listed =
                    |name: &String, tensor: &TensorEntry| (name.clone(), tensor.shape.clone(), tensor.dtype);
                let aliases = checkpoint.manifest().aliases.keys().filter(|_| with_aliases);
                let aliases = aliases.filter_map(|alias| Some(listed(alias, checkpoint.weights(alias)?)));
                tensors.map(|tensor| listed(&tensor.name, tensor)).chain(aliases).collect()
            }
            Weights::DeepSpeed(weights) => {
                let tensors = weights.tensors().iter();
                let tensors = tensors.filter(|tensor| with_aliases || tensor.alias_of.is_none());
                tensors.map(|tensor| (tensor.name.clone(), tensor.shape.clone(), tensor.dtype)).collect()
            }
        }
    }

    /// A tensor's bytes as stored.
    fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let absent = || CheckpointError::Request(format!("'{name}' is not in the checkpoint"));
        match self {
            Weights::Ours(checkpoint, _) => {
                let entry = checkpoint.weights(name).or_else(|| checkpoint.entry(&Kind::Buffer, name));
                let entry = entry.ok_or_else(absent)?;
                let mut bytes = Vec::new();
                checkpoint.read_bytes(entry, 0..entry.numel(), &mut bytes)?;
                Ok(bytes)
            }
            Weights::DeepSpeed(weights) => {
                weights.read(weights.tensors().iter().find(|tensor| tensor.name == name).ok_or_else(absent)?)
            }
        }
    }

    /// A tensor of floats in another type; others as stored.
    fn read_as(&self, (name, _, stored): &Listed, wanted: Dtype) -> Result<Vec<u8>, CheckpointError> {
        let bytes = self.read(name)?;
        if *stored == wanted || !stored.is_float() {
            return Ok(bytes);
        }
        let mut values = vec![0.0; bytes.len() / stored.size_bytes() as usize];
        let mut out = Vec::with_capacity(values.len() * wanted.size_bytes() as usize);
        let converted =
            stored.to_f32(&bytes, &mut values).and_then(|()| wanted.append_f32(&values, &mut out));
        converted.ok_or_else(|| CheckpointError::Request(format!("'{name}' cannot become {wanted:?}")))?;
        Ok(out)
    }
}

/// Our tensor type for a stored one; `None` for those that model files do not use.
fn tensor_type(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 | Dtype::F64 => DType::F32,
        Dtype::BF16 => DType::BF16,
        Dtype::F16 => DType::F16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool,
        Dtype::I16 | Dtype::I8 => return None,
    })
}

fn to_fp32(which: &Which, output: &Path, exclude_frozen: bool, unknown: Unknown) -> Result<(), Failure> {
    let weights = Weights::open(which, exclude_frozen, unknown)?;
    if output.extension().is_some_and(|extension| extension == "safetensors") {
        return write_safetensors(&weights, true, Dtype::F32, |tensors, bytes| {
            write_file(output, tensors, bytes)
        });
    }
    let listed = weights.list(true);
    let mut table = TensorTable::default();
    let wanted = |stored: Dtype| if stored.is_float() { Dtype::F32 } else { stored };
    let pairs =
        listed.iter().map(|(name, shape, stored)| (Value::str(name), table.tensor(wanted(*stored), shape)));
    let value = Value::OrderedDict(pairs.collect());
    let mut open: Option<(usize, Vec<u8>)> = None;
    write_pt(output, &value, &table.storages, &mut |storage, range, out| {
        let bytes = match open.take() {
            Some((at, bytes)) if at == storage => bytes,
            _ => weights.read_as(&listed[storage], Dtype::F32)?,
        };
        let size = wanted(listed[storage].2).size_bytes();
        out.extend_from_slice(&bytes[(range.start * size) as usize..(range.end * size) as usize]);
        open = Some((storage, bytes));
        Ok(())
    })?;
    Ok(())
}

/// Lists all weights and hands them to a writer, one at a time.
fn write_safetensors(
    weights: &Weights,
    with_aliases: bool,
    wanted: Dtype,
    write: impl FnOnce(
        &[TensorToWrite],
        &mut dyn FnMut(&TensorToWrite) -> Result<Vec<u8>, ModelError>,
    ) -> Result<(), ModelError>,
) -> Result<(), Failure> {
    let listed = weights.list(with_aliases);
    let mut tensors = Vec::with_capacity(listed.len());
    for (name, shape, stored) in &listed {
        let dtype = tensor_type(if stored.is_float() { wanted } else { *stored });
        let dtype = dtype.ok_or_else(|| {
            Failure::Run(format!("'{name}' is {stored:?}, which safetensors models do not use"))
        })?;
        tensors.push(TensorToWrite {
            name: name.clone(),
            shape: shape.iter().map(|size| *size as usize).collect(),
            dtype,
        });
    }
    let mut read = |tensor: &TensorToWrite| {
        let listed = listed.iter().find(|(name, ..)| *name == tensor.name);
        let bytes = listed.map_or(Ok(Vec::new()), |listed| weights.read_as(listed, wanted));
        bytes.map_err(|error| ModelError::BadFile {
            path: PathBuf::from(&tensor.name),
            why: error.to_string(),
        })
    };
    write(&tensors, &mut read).map_err(|error| Failure::Run(error.to_string()))
}

/// Writes a model's directory where there is none, whole or not at all.
fn export_hf(which: &Which, output: &Path, dtype: WeightType, max_shard_bytes: usize) -> Result<(), Failure> {
    if std::fs::read_dir(output).is_ok_and(|mut entries| entries.next().is_some()) || output.is_file() {
        let why = "is already there, and its files would stay beside the new ones; name a new directory";
        return Err(Failure::Usage(format!("{} {why}", output.display())));
    }
    let written = write_model(which, output, dtype, max_shard_bytes);
    if written.is_err() {
        // It was empty, or not there: nothing but what is incomplete goes.
        let _ = std::fs::remove_dir_all(output);
    }
    written
}

fn write_model(
    which: &Which,
    output: &Path,
    dtype: WeightType,
    max_shard_bytes: usize,
) -> Result<(), Failure> {
    let weights = Weights::open(which, false, Unknown::Refuse)?;
    let wanted = match dtype {
        WeightType::F32 => Dtype::F32,
        WeightType::Bf16 => Dtype::BF16,
        WeightType::F16 => Dtype::F16,
    };
    write_safetensors(&weights, false, wanted, |tensors, bytes| {
        write_directory(output, tensors, max_shard_bytes, bytes)
    })?;
    let Weights::Ours(checkpoint, _) = &weights else { return Ok(()) };
    // A run of a recipe knows what its model is.
    let Some(config) = checkpoint.manifest().client_state.get("model_config") else { return Ok(()) };
    let mut config = config.clone();
    if let Some(dtype) = tensor_type(wanted) {
        set_dtype(&mut config, dtype);
    }
    let failed = |error: ModelError| Failure::Run(error.to_string());
    write_config(output, &config).map_err(failed)?;
    // The tokenizer lies where the run will export its own model.
    let run = which.dir.canonicalize().ok().and_then(|dir| Some(dir.parent()?.join("model")));
    let Some(model) = run else { return Ok(()) };
    copy_files(&model, output, &TOKENIZER_FILES).map_err(failed)?;
    copy_files(&model, output, &GENERATION_FILES).map_err(failed)
}

fn import(which: &Which, output: &Path, unknown: Unknown) -> Result<(), Failure> {
    let hint = |name: &str| {
        ferrospeed_files::read_text(which.dir.join(name), 4096).ok().map(|text| text.trim().to_owned())
    };
    let tag = which.tag.clone().or_else(|| hint("latest")).or_else(|| hint("latest_universal"));
    let tag = tag.ok_or_else(|| {
        Failure::Usage(format!("{}: there is no 'latest'; give --tag", which.dir.display()))
    })?;
    let taken = output.join(&tag);
    if taken.exists() {
        let why = "is already there, and would be replaced; import into another folder, or remove it first";
        return Err(Failure::Usage(format!("{} {why}", taken.display())));
    }
    let target =
        Target { dir: output, tag: &tag, update_latest: true, retention: Retention::default(), fs: &Disk };
    let universal = which.dir.join(&tag);
    let path = if is_universal(&universal) {
        import_universal(&universal, unknown, &target)?
    } else {
        import_deepspeed(&which.dir, Some(&tag), unknown, &target)?
    };
    terminal::print_output(&format!("{}\n", path.display()))?;
    Ok(())
}

fn diff(first: &Path, second: &Path) -> Result<ExitCode, Failure> {
    let (first, second) =
        (Checkpoint::open(&resolve(first, None)?)?, Checkpoint::open(&resolve(second, None)?)?);
    let mut text = String::new();
    let mut note = |line: String| {
        text.push_str(&line);
        text.push('\n');
    };
    for tensor in &first.manifest().tensors {
        let what = format!("{} ({})", tensor.name, tensor.kind);
        let Some(other) = second.entry(&tensor.kind, &tensor.name) else {
            note(format!("only in the first   {what}"));
            continue;
        };
        if (&tensor.shape, tensor.dtype) != (&other.shape, other.dtype) {
            note(format!(
                "{what}: {:?} {:?} and {:?} {:?}",
                tensor.dtype, tensor.shape, other.dtype, other.shape
            ));
            continue;
        }
        let differing = count_differences(&first, tensor, &second, other)?;
        if differing > 0 {
            note(format!("{what}: {differing} of {} elements differ", tensor.numel()));
        }
    }
    for tensor in &second.manifest().tensors {
        if first.entry(&tensor.kind, &tensor.name).is_none() {
            note(format!("only in the second  {} ({})", tensor.name, tensor.kind));
        }
    }
    let [one, other] = [&first, &second].map(|checkpoint| serde_json::json!(checkpoint.manifest().training));
    differences("", &one, &other, &mut note);
    let same = text.is_empty();
    terminal::print_output(if same { "the same\n" } else { &text })?;
    Ok(if same { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// Notes the counters, and the parts of schedule, loss scale and groups, that differ.
fn differences(at: &str, one: &serde_json::Value, other: &serde_json::Value, note: &mut impl FnMut(String)) {
    use serde_json::Value::{Array, Null, Object};
    let below = |name: &str| if at.is_empty() { name.to_owned() } else { format!("{at}.{name}") };
    match (one, other) {
        (Object(ones), Object(others)) => {
            let only_there = others.keys().filter(|key| !ones.contains_key(*key));
            for key in ones.keys().chain(only_there) {
                let value = |of: &serde_json::Map<_, _>| of.get(key).cloned().unwrap_or(Null);
                differences(&below(key), &value(ones), &value(others), note);
            }
        }
        (Array(ones), Array(others)) if ones.len() == others.len() => {
            let pairs = ones.iter().zip(others).enumerate();
            pairs.for_each(|(at, (one, other))| differences(&below(&at.to_string()), one, other, note));
        }
        _ if one != other => note(format!("{at}: {one} and {other}")),
        _ => {}
    }
}

/// Elements that differ, read a stretch at a time.
fn count_differences(
    first: &Checkpoint,
    one: &TensorEntry,
    second: &Checkpoint,
    other: &TensorEntry,
) -> Result<u64, CheckpointError> {
    const STEP: u64 = 1 << 20;
    let size = one.dtype.size_bytes() as usize;
    let mut differing = 0;
    let mut at = 0;
    while at < one.numel() {
        let end = (at + STEP).min(one.numel());
        let (mut a, mut b) = (Vec::new(), Vec::new());
        first.read_bytes(one, at..end, &mut a)?;
        second.read_bytes(other, at..end, &mut b)?;
        differing += a.chunks_exact(size).zip(b.chunks_exact(size)).filter(|(a, b)| a != b).count() as u64;
        at = end;
    }
    Ok(differing)
}
