//! `ferrospeed train`: starts the ranks of a recipe, or is one of them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use ferrospeed_comm::{ConnectOptions, World};
use ferrospeed_launch::supervise::OutputMode;
use ferrospeed_launch::{JobOutcome, LocalJob};
use ferrospeed_train::{
    Ending, Job, Observing, Preparing, Recipe, Resume, RunFolder, StopRequests, Summary, TrainError,
    report_failure,
};
use serde_json::Value;

use super::autotune::{self, Autotuning};
use super::device::DeviceChoice;
use super::{place, train_memory};
use crate::failure::Failure;
use crate::progress::{TERMINAL, TrainProgress, WarningWriter, grouped};
use crate::terminal::{Paint, print_error, print_note, print_output, stdout_can_be_redrawn};

/// Arguments of `train`.
#[derive(Debug, Args)]
pub(crate) struct TrainArgs {
    /// The recipe (TOML)
    recipe: PathBuf,
    /// How many ranks to start on this host [default: the recipe's]
    #[arg(short = 'n', long = "ranks", value_name = "RANKS")]
    ranks: Option<u32>,
    /// Cut the model into so many stages, each on ranks of its own (pipeline.stages); without -n, as many ranks as these need
    #[arg(long, value_name = "STAGES")]
    pp: Option<u32>,
    /// The order in which stages work: 1f1b, interleaved:CHUNKS, zb-h1 or zb-v (pipeline.schedule)
    #[arg(long = "pp_schedule", alias = "pp-schedule", value_name = "SCHEDULE")]
    pp_schedule: Option<String>,
    /// Cut layers into so many slices, each on a rank of its own (tensor_parallel.autotp_size)
    #[arg(long, value_name = "SLICES")]
    tp: Option<u32>,
    /// Spread the experts of each layer over so many of the ranks that see different samples (expert_parallel.autoep_size)
    #[arg(long, value_name = "RANKS")]
    ep: Option<u32>,
    /// Cut sequences into so many parts, each on a rank of its own (sequence_parallel_size)
    #[arg(long, value_name = "PARTS")]
    sp: Option<u32>,
    /// How ranks that share a sequence attend over all of it: ulysses (they exchange parts of it for heads) or ring (keys
    /// travel round them) (sequence_parallel_method)
    #[arg(long = "sp_method", alias = "sp-method", value_name = "METHOD", value_parser = ["ulysses", "ring"])]
    sp_method: Option<String>,
    /// Where the run's files go [default: runs/NAME]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on from a checkpoint: auto (the newest of this run, or from the start where there is none), its name, or a folder
    #[arg(long, value_name = "auto|TAG|DIR", num_args = 0..=1, default_missing_value = "auto")]
    resume: Option<String>,
    /// Remove what an earlier run has left in the folder, and start anew
    #[arg(long, conflicts_with = "resume")]
    overwrite: bool,
    /// Leave every other ten steps unlogged and unshown, and say what logs, monitors and progress cost
    #[arg(long = "measure_observing", alias = "measure-observing")]
    measure_observing: bool,
    /// Change a key of the recipe (steps=8) or of the ds_config (zero_optimization.stage=3); may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Start even if the plan says that memory will not do
    #[arg(long)]
    force: bool,
    /// Write a timeline of all ranks, for Perfetto or Chrome [default: the recipe's]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Search for the fastest configuration in short runs: tune writes it down, run also trains with it
    #[arg(long, value_name = "tune|run", conflicts_with_all = ["resume", "measure_observing"])]
    autotuning: Option<Autotuning>,
    /// One short run of such a search: nothing is validated, sampled or exported
    #[arg(long, hide = true)]
    experiment: bool,
    /// Where to compute: auto (a GPU where there is one), cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "FERROSPEED_DEVICE", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
}

/// Ranks may need this long to finish their step and save after a signal.
const INTERRUPT_GRACE: Duration = Duration::from_secs(600);

/// More processes than this are a slip of the finger.
const MAX_RANKS_OF_HOST: u32 = 1024;

/// Tells ranks that this program started them, has looked at the recipe, and holds the lock of the run's folder.
const LOOKED_AHEAD: &str = "FERROSPEED_TRAIN_LOOKED_AHEAD";

/// A run that saved and left as SIGTERM or SIGUSR2 asked: `EX_TEMPFAIL`, try again. `--resume` goes on.
const EXIT_SAVED: u8 = 75;

/// A run that Ctrl-C stopped at the end of a step.
const EXIT_INTERRUPTED: u8 = 130;

pub(crate) fn run(args: &TrainArgs) -> Result<ExitCode, Failure> {
    if let Some(mode) = args.autotuning {
        return autotune::run(args, mode);
    }
    let recipe = args.load_recipe()?;
    let place = place::of_this_process()?;
    let folder = RunFolder::at(args.out.clone().unwrap_or_else(|| PathBuf::from("runs").join(&recipe.name)));
    let folder = if place.is_some() { folder } else { own_folder(args, folder)? };
    let mut lock = None;
    if place.is_none() {
        // A recipe that cannot be run leaves no folder behind.
        let model = look_ahead(args, &recipe, &folder)?;
        if recipe.ranks > MAX_RANKS_OF_HOST {
            let why = format!(
                "{} ranks are too many for one host: at most {MAX_RANKS_OF_HOST}; set ranks in the recipe or give -n",
                recipe.ranks
            );
            return Err(Failure::Usage(why));
        }
        if !args.force {
            train_memory::check(&recipe, &model, args.device)?;
        }
        lock = Some(folder.lock().map_err(failure)?);
        if args.overwrite {
            keep_own_model(&recipe, &folder)?;
            folder.set_aside().map_err(failure)?;
        }
    }
    let name = recipe.name.clone();
    let outcome = if place.is_some() || recipe.ranks == 1 {
        run_rank(args, recipe, &folder, place)
    } else {
        start_ranks(args, &recipe, &folder)
    };
    // Who started the ranks writes down that they failed: they may not have lived to do so.
    if let (Some(_), Err(failure)) = (&lock, &outcome) {
        report_failure(&folder, &name, &failure.to_string());
    }
    if lock.is_some() {
        settle(&folder);
    }
    outcome
}

/// A run cannot replace the model that it starts from.
fn keep_own_model(recipe: &Recipe, folder: &RunFolder) -> Result<(), Failure> {
    let Some(path) = &recipe.model.path else { return Ok(()) };
    let inside = |folder: &Path| {
        let (path, folder) = (path.canonicalize(), folder.canonicalize());
        matches!((path, folder), (Ok(path), Ok(folder)) if path.starts_with(&folder))
    };
    if inside(&folder.model()) || inside(&folder.checkpoints()) {
        let why = format!(
            "model.path: {} lies in the folder that --overwrite replaces; choose another --out",
            path.display()
        );
        return Err(Failure::Usage(why));
    }
    Ok(())
}

/// Gives the earlier run back where this one has failed before its first step.
fn settle(folder: &RunFolder) {
    let waits = folder.is_being_replaced();
    match folder.settle() {
        Ok(()) if waits => {
            print_note(&format!(
                "{}: no step was taken, and the earlier run is as it was",
                folder.path().display()
            ));
        }
        Ok(()) => {}
        Err(error) => print_note(&format!("the earlier run could not be put back: {error}")),
    }
}

/// The folder the run may use: a new run does not write over an old one's log and weights.
fn own_folder(args: &TrainArgs, folder: RunFolder) -> Result<RunFolder, Failure> {
    if folder.is_being_replaced() {
        // A run that was to replace another was killed.
        let _lock = folder.lock().map_err(failure)?;
        settle(&folder);
    }
    if args.resume.is_some() || args.overwrite || !folder.holds_run() {
        return Ok(folder);
    }
    if args.out.is_some() {
        return Err(failure(TrainError::Used { dir: folder.path().to_path_buf() }));
    }
    let free = folder.or_next_free();
    print_note(&format!(
        "{} holds an earlier run: this one goes to {} (--resume goes on with the earlier one, --overwrite replaces it)",
        folder.path().display(),
        free.path().display()
    ));
    Ok(free)
}

/// Ranks look again; a mistake is said once, before any of them begins, and text becomes tokens once.
fn look_ahead(args: &TrainArgs, recipe: &Recipe, folder: &RunFolder) -> Result<Value, Failure> {
    let model =
        ferrospeed_train::check(recipe, &args.recipe, folder, &mut tell_preparing()).map_err(failure)?;
    if args.overwrite {
        return Ok(model);
    }
    let start = args.resume().find(folder).map_err(failure)?;
    if args.resume.is_some() && start.candidates.is_empty() {
        // A run that has ended cannot be made again from what it left.
        if folder.holds_weights() {
            let why = "holds a run that has ended and no checkpoint to go on from";
            return Err(Failure::Run(format!(
                "{} {why}; give another --out, or --overwrite to replace it (its weights can be trained further: model.path)",
                folder.path().display()
            )));
        }
        let folder = folder.checkpoints();
        print_note(&format!("{}: no checkpoint yet, so the run starts at step 1", folder.display()));
    }
    Ok(model)
}

/// A line whenever another tenth of a text that is not small became tokens.
fn tell_preparing() -> impl FnMut(Preparing) {
    const WORTH_TELLING_BYTES: u64 = 32 << 20;
    let mut told = 0;
    move |now| {
        let tenths = now.bytes * 10 / now.total_bytes.max(1);
        if now.total_bytes >= WORTH_TELLING_BYTES && tenths > told {
            told = tenths;
            let _ = print_output(&format!(
                "text to tokens: {} %, {} of {} MiB, {} tokens",
                tenths * 10,
                now.bytes >> 20,
                now.total_bytes >> 20,
                grouped(now.tokens)
            ));
        }
    }
}

impl TrainArgs {
    /// The recipe as the other arguments change it.
    pub(super) fn load_recipe(&self) -> Result<Recipe, Failure> {
        let mut recipe = Recipe::load(&self.recipe, &self.overrides())
            .map_err(|error| Failure::Usage(error.to_string()))?;
        recipe.ranks = self.ranks.unwrap_or(recipe.ranks.max(self.ranks_of_a_sample()));
        recipe.trace = self.trace.clone().or(recipe.trace);
        Ok(recipe)
    }

    pub(super) fn recipe(&self) -> &Path {
        &self.recipe
    }

    pub(super) fn device(&self) -> DeviceChoice {
        self.device
    }

    /// How many ranks compute where, as arguments.
    pub(super) fn words_of_place(&self, ranks: u32) -> Vec<String> {
        vec!["-n".to_owned(), ranks.to_string(), "--device".to_owned(), self.device.to_string()]
    }

    /// All arguments but the search, for a run of what it found.
    pub(super) fn words_besides_search(&self, ranks: u32) -> Vec<String> {
        let mut words = self.words_of_place(ranks);
        words.extend(self.out.iter().flat_map(|out| ["--out".to_owned(), out.display().to_string()]));
        words.extend(self.overwrite.then(|| "--overwrite".to_owned()));
        words.extend(self.force.then(|| "--force".to_owned()));
        // Those of the ds_config are in the file that was found.
        let own = self.overrides.iter().filter(|assignment| Recipe::is_own_key(assignment));
        words.extend(own.flat_map(|assignment| ["--set".to_owned(), assignment.clone()]));
        words
    }

    fn overrides(&self) -> Vec<String> {
        let sizes = [
            ("pipeline.stages", self.pp),
            ("tensor_parallel.autotp_size", self.tp),
            ("expert_parallel.autoep_size", self.ep),
            ("sequence_parallel_size", self.sp),
        ];
        let sizes = sizes.into_iter().filter_map(|(key, size)| Some(format!("{key}={}", size?)));
        let names = [("sequence_parallel_method", &self.sp_method), ("pipeline.schedule", &self.pp_schedule)];
        let names = names.into_iter().filter_map(|(key, name)| Some(format!("{key}={}", name.as_ref()?)));
        self.overrides.iter().cloned().chain(sizes).chain(names).collect()
    }

    /// How many ranks the axes need that are given here.
    fn ranks_of_a_sample(&self) -> u32 {
        [self.pp, self.tp, self.sp].into_iter().flatten().fold(1, u32::saturating_mul)
    }

    fn resume(&self) -> Resume {
        self.resume.as_deref().map_or(Resume::No, Resume::parse)
    }
}

fn failure(error: TrainError) -> Failure {
    match error {
        TrainError::Recipe { .. } | TrainError::Occupied { .. } | TrainError::Used { .. } => {
            Failure::Usage(error.to_string())
        }
        other => Failure::Run(other.to_string()),
    }
}

/// Starts this program again, once per rank.
fn start_ranks(args: &TrainArgs, recipe: &Recipe, folder: &RunFolder) -> Result<ExitCode, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let mut words = vec!["train".to_owned(), args.recipe.display().to_string()];
    words.extend(["--out".to_owned(), folder.path().display().to_string()]);
    words.extend(args.words_of_place(recipe.ranks));
    words.extend(args.measure_observing.then(|| "--measure_observing".to_owned()));
    words.extend(args.trace.iter().flat_map(|file| ["--trace".to_owned(), file.display().to_string()]));
    words.extend(args.experiment.then(|| "--experiment".to_owned()));
    words.extend(args.resume.iter().map(|from| format!("--resume={from}")));
    words.extend(args.overrides().into_iter().flat_map(|assignment| ["--set".to_owned(), assignment]));
    let mut job = LocalJob::new(program.display().to_string(), words, recipe.ranks);
    job.output = OutputMode::Plain;
    if let Some(terminal) = crate::progress::terminal() {
        // Rank 0 draws on it; what ranks say goes to their logs, and their last lines into the report of a failure.
        job.env.insert(TERMINAL.into(), terminal);
        job.output = OutputMode::Hidden;
    }
    job.env.insert(LOOKED_AHEAD.into(), "1".into());
    job.log_dir = Some(folder.logs());
    job.interrupt_grace = INTERRUPT_GRACE;
    job.share_cores();
    let outcome = job.run()?;
    match &outcome {
        // Rank 0 has said what it saved.
        JobOutcome::Failed(report) if report.ended.exit_code() == EXIT_SAVED => {}
        JobOutcome::Failed(report) => {
            print_error(&report.to_string());
            report_failure(folder, &recipe.name, &report.to_string());
        }
        JobOutcome::Interrupted { agreed_code: None, .. } => {
            print_error(
                "the ranks were stopped before they had saved; --resume goes on from the last checkpoint",
            );
        }
        JobOutcome::Interrupted { .. } | JobOutcome::Succeeded => {}
    }
    Ok(ExitCode::from(outcome.exit_code()))
}

fn run_rank(
    args: &TrainArgs,
    mut recipe: Recipe,
    folder: &RunFolder,
    place: Option<ConnectOptions>,
) -> Result<ExitCode, Failure> {
    // What concerns the whole job every rank would say; one is enough.
    let asked_for = format!("warn,{}=info", ferrospeed_comm::ASKED_FOR);
    let level = if place.as_ref().is_some_and(|place| place.rank != 0) { "error" } else { &asked_for };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| level.into()),
        )
        .with_ansi(Paint::for_stderr().is_on())
        .with_writer(WarningWriter { only_block: stdout_can_be_redrawn() })
        .try_init();
    let requests = watch_signals()?;
    let folder_is_held = place.is_none() || std::env::var_os(LOOKED_AHEAD).is_some();
    let world = match place {
        Some(place) => join(args, &mut recipe, folder, place)?,
        None => World::solo(),
    };
    let every = recipe.config().ok().and_then(|(config, _)| config.steps_per_print).unwrap_or(10).max(1);
    let rank = world.rank();
    let mut progress = TrainProgress::new(&recipe.name, recipe.steps, every);
    let job = Job {
        recipe: &recipe,
        path: &args.recipe,
        world: world.clone(),
        device: args.device.open()?,
        folder,
        folder_is_held,
        resume: args.resume(),
        requests,
        observing: if args.measure_observing { Observing::Alternating } else { Observing::Always },
        is_experiment: args.experiment,
        in_tiles: super::doctor::multiplies_in_tiles(),
    };
    let summary = ferrospeed_train::run(&job, &mut progress).map_err(failure)?;
    if rank == 0 {
        progress.conclude(&conclusion(&recipe, &summary, folder));
    }
    // A rank that leaves with a code of its own is a failure to the launcher, so none leaves before all are done.
    if summary.ending != Ending::Finished {
        world.group().barrier().map_err(|error| Failure::Run(error.to_string()))?;
    }
    Ok(match summary.ending {
        Ending::Finished => ExitCode::SUCCESS,
        Ending::Stopped => ExitCode::from(EXIT_INTERRUPTED),
        Ending::Left => ExitCode::from(EXIT_SAVED),
    })
}

/// Takes this rank's place in its job. Where another launcher started the ranks, nobody has looked at the recipe yet:
/// rank 0 does, while the others wait.
fn join(
    args: &TrainArgs,
    recipe: &mut Recipe,
    folder: &RunFolder,
    mut place: ConnectOptions,
) -> Result<World, Failure> {
    let failed = |error: ferrospeed_comm::Error| Failure::Run(error.to_string());
    recipe.ranks = u32::try_from(place.world_size).unwrap_or(u32::MAX);
    place.config_hash = recipe
        .config()
        .map_or_else(|_| String::new(), |(config, _)| format!("{:016x}", config.canonical_hash()));
    let world = World::connect(place).map_err(failed)?;
    if std::env::var_os(LOOKED_AHEAD).is_none() {
        if world.rank() == 0 {
            look_ahead(args, recipe, folder)?;
            if args.overwrite {
                let _lock = folder.lock().map_err(failure)?;
                folder.set_aside().map_err(failure)?;
            }
        }
        world.group().barrier().map_err(failed)?;
    }
    Ok(world)
}

/// SIGINT asks for the end of the step, a second one ends at once. SIGTERM and SIGUSR2 ask to save and leave, however
/// often they come: a batch system may send them to the launcher and to the ranks.
fn watch_signals() -> Result<StopRequests, Failure> {
    use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR2};
    let requests = StopRequests::default();
    // In this order: the handler that ends at once sees the flag as the first signal left it.
    signal_hook::flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, requests.finish.clone())
        .and_then(|_| signal_hook::flag::register(SIGINT, requests.finish.clone()))
        .and_then(|_| signal_hook::flag::register(SIGTERM, requests.leave.clone()))
        .and_then(|_| signal_hook::flag::register(SIGUSR2, requests.leave.clone()))
        .map_err(|error| Failure::Run(format!("cannot watch for signals: {error}")))?;
    Ok(requests)
}

/// What a person wants to know at the end.
fn conclusion(recipe: &Recipe, summary: &Summary, folder: &RunFolder) -> String {
    let mut text = String::new();
    if let Some(sample) = &summary.sample {
        text.push_str(&format!("\n--- sample ---\n{sample}\n---\n"));
    }
    let how = if summary.ending == Ending::Finished { "finished" } else { "stopped by request after" };
    let per_byte = |loss: f32| {
        let bytes = summary.bytes_per_token?;
        Some(format!(" ({:.3} nats per byte)", f64::from(loss) / bytes))
    };
    let validation = summary.validation_loss.map_or(String::new(), |loss| {
        format!(", validation loss {loss:.4}{}", per_byte(loss).unwrap_or_default())
    });
    let Some(loss) = summary.loss else {
        text.push_str(&format!("\nall {} steps were taken before: nothing is left to do\n", summary.steps));
        return text;
    };
    text.push_str(&format!(
        "\n{how} {} steps in {:.1} s: loss {loss:.4}{validation}; logs, progress and report took {:.2} % of it\nreport   {}\nlog      {}\n",
        summary.steps,
        summary.seconds,
        100.0 * summary.observing_seconds / summary.seconds.max(f64::MIN_POSITIVE),
        folder.report().display(),
        folder.log().display(),
    ));
    if let Some(table) = &summary.communication {
        text.push_str(&format!("\ncommunication of rank 0\n{table}\n"));
    }
    if let Some(cost) = &summary.observing_cost {
        text.push_str(&format!(
            "a step took {:.3} ms with logs, monitors and progress and {:.3} ms without (medians of {} each): {:+.2} %\n",
            cost.with_ms,
            cost.without_ms,
            cost.steps,
            100.0 * (cost.with_ms / cost.without_ms - 1.0),
        ));
    }
    if let Some(trace) = &recipe.trace {
        text.push_str(&format!("trace    {}\n", trace.display()));
    }
    if let Some(checkpoint) = &summary.checkpoint {
        text.push_str(&format!("saved    {}\n", checkpoint.display()));
    }
    if summary.ending != Ending::Left {
        text.push_str(&format!("weights  {}\n", folder.model().display()));
    }
    if summary.ending != Ending::Finished {
        text.push_str("go on with --resume\n");
    }
    text
}
