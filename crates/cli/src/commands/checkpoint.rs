//! `ferrospeed checkpoint`: look at checkpoints, check them, and carry them to and from DeepSpeed and Hugging Face.

use std::fmt::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use ferrospeed_checkpoint::deepspeed::{
    ExportOptions, PipelineFiles, Spelling, export_deepspeed, export_pipeline, export_universal,
    import_deepspeed, import_universal, is_universal,
};
use ferrospeed_checkpoint::directory::LOCK_FILE;
use ferrospeed_checkpoint::pt::Unknown;
use ferrospeed_checkpoint::pt::pickle::NOT_ALLOWED;
use ferrospeed_checkpoint::{Checkpoint, CheckpointError, Disk, Kind, Manifest, Retention, Target};
use ferrospeed_command::writable::{absent, impossible, remove_empty};
use ferrospeed_command::{Failure, terminal};

use super::checkpoint_diff;
use super::checkpoint_verify::verify;
use super::checkpoint_weights::{Weights, export_hf, to_fp32};
use super::checkpoint_which::Which;
use super::counts::at_least_one_here;
use super::output_file::check_place;

#[derive(Debug, Args)]
pub(crate) struct CheckpointArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum WeightType {
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
    /// Read everything and compare every checksum: of one checkpoint, or of all in a folder
    Verify {
        #[command(flatten)]
        which: Which,
    },
    /// Write the f32 weights of a checkpoint, ours or DeepSpeed's, into one file
    ToFp32 {
        #[command(flatten)]
        which: Which,
        /// The file: .safetensors, or .bin, .pt or .pth for one of torch
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
        /// The type of the weights [default: the one that was trained in; of DeepSpeed's files f32]
        #[arg(long, value_enum)]
        dtype: Option<WeightType>,
        /// The largest file
        #[arg(long, value_name = "BYTES", default_value = "5000000000", value_parser = at_least_one_here)]
        max_shard_bytes: NonZeroUsize,
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
        #[arg(long, value_name = "LAYERS", value_delimiter = ',', value_parser = layer_number, conflicts_with = "expert_ranks")]
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
        /// One checkpoint's own folder, or one that holds checkpoints or a run, of which the one that `latest` names is taken
        first: PathBuf,
        /// The other's
        second: PathBuf,
    },
}

/// Numbers of layers, in one word.
#[derive(Debug, Clone)]
struct TiedLayers(Vec<u64>);

impl std::str::FromStr for TiedLayers {
    type Err = String;

    fn from_str(text: &str) -> Result<TiedLayers, String> {
        text.split(',').map(layer_number).collect::<Result<_, _>>().map(TiedLayers)
    }
}

fn layer_number(word: &str) -> Result<u64, String> {
    word.trim().parse().map_err(|_| format!("'{word}' is no layer's number; write them as 0,5"))
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

impl Action {
    /// Where it writes, if it does.
    fn output(&self) -> Option<&Path> {
        match self {
            Action::ToFp32 { output, .. }
            | Action::ExportHf { output, .. }
            | Action::ImportDeepspeed { output, .. }
            | Action::ExportDeepspeed { output, .. }
            | Action::ToUniversal { output, .. } => Some(output),
            Action::Inspect { .. } | Action::Verify { .. } | Action::Diff { .. } => None,
        }
    }
}

pub(crate) fn run(args: &CheckpointArgs) -> Result<ExitCode, Failure> {
    if let Some(why) = args.action.output().and_then(impossible) {
        return Err(Failure::Usage(why));
    }
    let made = args.action.output().map_or(Vec::new(), absent);
    // What was made for nothing goes again, but for folders that were there.
    act(&args.action).inspect_err(|_| remove_empty(&made))
}

fn act(action: &Action) -> Result<ExitCode, Failure> {
    match action {
        Action::Inspect { which, json, tensors } => inspect(which, *json, *tensors)?,
        Action::Verify { which } => verify(which)?,
        Action::ToFp32 { which, output, overwrite, exclude_frozen_parameters, allow_unknown_objects } => {
            if output.exists() && !overwrite {
                let why = "is already there; --overwrite replaces it";
                return Err(Failure::Usage(format!("{} {why}", output.display())));
            }
            check_place(output)?;
            let unknown = unknown(*allow_unknown_objects);
            let weights = Weights::open(which, *exclude_frozen_parameters, unknown).map_err(may_be_kept)?;
            to_fp32(&weights, output)?;
        }
        Action::ExportHf { which, output, dtype, max_shard_bytes } => {
            export_hf(which, output, *dtype, max_shard_bytes.get())?;
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
            let bare = export_pipeline(&which.open_for_deepspeed()?, output, files)?;
            if bare > 0 {
                terminal::print_note(&format!(
                    "--pipeline: the last {bare} layer(s) have no parameters in this checkpoint, and so no files"
                ));
            }
        }
        Action::ExportDeepspeed { which, output, stage, ranks, expert_ranks, names, .. } => {
            let options = ExportOptions {
                stage: stage.unwrap_or(2),
                ranks: *ranks,
                expert_ranks: *expert_ranks,
                spelling: names.spelling(),
            };
            export_deepspeed(&which.open_for_deepspeed()?, output, options)?;
        }
        Action::ToUniversal { which, output, names } => {
            export_universal(&which.open_for_deepspeed()?, output, names.spelling())?;
        }
        // As diff(1): what could not be compared does not differ.
        Action::Diff { first, second } => {
            return checkpoint_diff::diff(first, second)
                .map_err(|failure| Failure::Usage(failure.to_string()));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Where a name in a torch file was refused, says how it is not, in a command that has the option.
fn may_be_kept(error: CheckpointError) -> Failure {
    let is_name = error.to_string().contains(NOT_ALLOWED);
    match (error.into(), is_name) {
        (Failure::Run(why), true) => {
            Failure::Run(format!("{why}; --allow-unknown-objects keeps such objects as inert data"))
        }
        (failure, _) => failure,
    }
}

fn unknown(allowed: bool) -> Unknown {
    if allowed { Unknown::Keep } else { Unknown::Refuse }
}

fn inspect(which: &Which, json: bool, tensors: bool) -> Result<(), Failure> {
    let checkpoint = which.open()?;
    which.tell_of_others(&checkpoint);
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
    line("kernels", origin.kernels.clone().unwrap_or_else(|| "not known".to_owned()));
    // AdamW and Adam are one rule, which the origin names; the configuration has the user's word.
    let optimizer = manifest.config["optimizer"]["type"].as_str().or(origin.optimizer.as_deref());
    line("optimizer", optimizer.unwrap_or("none").to_owned());
    line("steps", format!("{} ({} skipped)", training.global_steps, training.skipped_steps));
    line("samples", training.global_samples.to_string());
    line("learning rates", format!("{rates:?}"));
    line("client state", manifest.client_state.to_string());
    text
}

fn import(which: &Which, output: &Path, unknown: Unknown) -> Result<(), Failure> {
    let folder = which.folder();
    let hint = |name: &str| {
        ferrospeed_files::read_text(folder.join(name), 4096).ok().map(|text| text.trim().to_owned())
    };
    let tag = which.tag.clone().or_else(|| hint("latest")).or_else(|| hint("latest_universal"));
    let tag =
        tag.ok_or_else(|| Failure::Usage(format!("{}: there is no 'latest'; give --tag", folder.display())))?;
    let taken = output.join(&tag);
    if taken.exists() {
        let why = "is already there, and would be replaced; import into another folder, or remove it first";
        return Err(Failure::Usage(format!("{} {why}", taken.display())));
    }
    let target =
        Target { dir: output, tag: &tag, update_latest: true, retention: Retention::default(), fs: &Disk };
    let is_new = !output.exists();
    let universal = folder.join(&tag);
    let path = if is_universal(&universal) {
        import_universal(&universal, unknown, &target)
    } else {
        import_deepspeed(&folder, Some(&tag), unknown, &target)
    };
    let path = path.map_err(|error| {
        if is_new {
            let _ = std::fs::remove_file(output.join(LOCK_FILE));
        }
        may_be_kept(error)
    })?;
    terminal::print_output(&format!("{}\n", path.display()))?;
    Ok(())
}
