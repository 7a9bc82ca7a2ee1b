//! `ferrospeed train`: starts the ranks of a recipe, or is one of them.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use ferrospeed_comm::World;
use ferrospeed_comm::blame::follower_exit;
use ferrospeed_command::terminal::{Paint, print_error, stdout_can_be_redrawn};
use ferrospeed_command::{DeviceChoice, Failure, place};
use ferrospeed_launch::elastic::ROUND_VARIABLE;
use ferrospeed_launch::supervise::{OutputMode, SignalHandling, is_ignored};
use ferrospeed_launch::{JobOutcome, LocalJob};
use ferrospeed_train::{
    Ending, Job, Observing, Recipe, Resume, RunFolder, StopRequests, Summary, TrainError, report_failure,
};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};

use super::autotune::{self, Autotuning};
use super::from_hub;
use super::offload_folders::FoldersToMake;
use super::old_recorders;
use super::other_files;
use super::starter::Starter;
use super::train_start;
use super::train_words;
use super::waiting::Waiting;
use crate::progress::{TERMINAL, TrainProgress, WarningWriter};

/// Arguments of `train`.
#[derive(Debug, Clone, Args)]
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
    /// Where the run's files go [default: runs/NAME, or with --resume the folder of the run that is gone on with]
    #[arg(long, value_name = "DIR")]
    pub(super) out: Option<PathBuf>,
    /// Go on from a checkpoint: auto (the newest of this run, or from the start where there is none), its name, or a folder: of a run,
    /// which is gone on with where it is, or of any checkpoint, with which a run of its own begins
    #[arg(long, value_name = "auto|TAG|DIR", num_args = 0..=1, default_missing_value = "auto")]
    pub(super) resume: Option<String>,
    /// With --resume: take weights, counters and schedule of the checkpoint and begin the optimizer's states anew, for another
    /// optimizer say
    #[arg(long = "fresh_optimizer", alias = "fresh-optimizer", requires = "resume")]
    pub(super) fresh_optimizer: bool,
    /// Remove what an earlier run has left in the folder, and start anew
    #[arg(long, conflicts_with = "resume")]
    pub(super) overwrite: bool,
    /// Leave every other ten steps unlogged and unshown, and say what logs, monitors and progress cost
    #[arg(long = "measure_observing", alias = "measure-observing")]
    pub(super) measure_observing: bool,
    /// Change a key of the recipe (steps=8) or of the ds_config (zero_optimization.stage=3); may be repeated
    #[arg(long = "set", value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Start even if memory will not do by the plan, or the disk by what a checkpoint needs
    #[arg(long)]
    pub(super) force: bool,
    /// Write a timeline of all ranks, for Perfetto or Chrome [default: the recipe's]
    #[arg(long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Search for the fastest configuration in short runs: tune writes it down, run also trains with it
    #[arg(long, value_name = "tune|run", conflicts_with_all = ["resume", "measure_observing"])]
    autotuning: Option<Autotuning>,
    /// One short run of such a search: nothing is validated, sampled or exported
    #[arg(long, hide = true)]
    pub(super) experiment: bool,
    /// Where to compute: auto (a GPU where there is one), cpu, cuda or cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto", env = "FERROSPEED_DEVICE", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
}

/// Ranks may need this long to finish their step and save after a signal.
const INTERRUPT_GRACE: Duration = Duration::from_secs(600);

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
    // Before anything that takes its time: a signal must find somebody who hears it.
    let requests = watch_signals()?;
    let starter = Starter::of_this_process();
    let mut recipe = args.load_recipe(&requests)?;
    let place = place::of_this_process()?;
    let folder = args.folder(&recipe);
    let args = &args.in_its_round(&folder)?;
    let Some(place) = place else {
        let _made = FoldersToMake::of(&recipe);
        let (folder, _lock) = train_start::begin(args, &recipe, folder, &requests)?;
        let name = recipe.name.clone();
        let outcome = match recipe.ranks {
            1 => {
                start_log(0, Standing::Alone);
                World::try_solo()
                    .map_err(|error| Failure::Run(error.to_string()))
                    .and_then(|world| run_rank(args, recipe, &folder, world, requests, Standing::Alone))
            }
            _ => start_ranks(args, &recipe, &folder, &requests),
        };
        return train_start::conclude(&folder, &name, outcome);
    };
    if let Some(asked) = args.ranks.filter(|asked| *asked as usize != place.world_size) {
        return Err(Failure::Usage(format!(
            "-n {asked}: a launcher has started {} rank(s), and it decides how many there are; tell it to start {asked}, or leave -n out",
            place.world_size
        )));
    }
    start_log(place.rank, Standing::Among(starter));
    recipe.ranks = u32::try_from(place.world_size).unwrap_or(u32::MAX);
    let is_ours = std::env::var_os(LOOKED_AHEAD).is_some();
    let waiting = Waiting::until_signals(&requests, is_ours)?;
    let world = World::connect(place).map_err(|error| Failure::Run(error.to_string()))?;
    train_start::same_on_all(&world, &recipe, &folder)?;
    if is_ours {
        drop(waiting);
        return run_rank(args, recipe, &folder, world, requests, Standing::Among(starter))
            .map_err(own_or_anothers);
    }
    let _made = (world.rank() == 0).then(|| FoldersToMake::of(&recipe));
    let lock = train_start::begin_together(args, &recipe, &folder, &world)?;
    drop(waiting);
    let name = recipe.name.clone();
    let outcome = run_rank(args, recipe, &folder, world, requests, Standing::Among(starter));
    // Who holds the folder writes down how the run ended.
    if lock.is_none() {
        return outcome.map_err(own_or_anothers);
    }
    if let (Ok(_), Some(why)) = (&outcome, starter.is_gone()) {
        report_failure(&folder, &name, &why);
    }
    train_start::conclude(&folder, &name, outcome).map_err(own_or_anothers)
}

/// The failure of a rank, with the exit code that its launcher wants where it is another's.
fn own_or_anothers(failure: Failure) -> Failure {
    match failure {
        Failure::Run(text) => match follower_exit(&text) {
            Some(code) => Failure::Stopped(code, text),
            None => Failure::Run(text),
        },
        other => other,
    }
}

/// Whether this process is the whole run, or one rank of it.
#[derive(Debug, Clone, Copy)]
enum Standing {
    Alone,
    Among(Starter),
}

impl Standing {
    /// A rank's output goes through its launcher, which may show it a terminal that nobody looks at.
    fn draws_on_stdout(self) -> bool {
        matches!(self, Standing::Alone) && stdout_can_be_redrawn()
    }
}

impl TrainArgs {
    /// The recipe as the other arguments change it.
    pub(super) fn load_recipe(&self, requests: &StopRequests) -> Result<Recipe, Failure> {
        other_files::check(&self.recipe)?;
        let mut recipe = Recipe::load(&self.recipe, &self.overrides())
            .map_err(|error| Failure::Usage(error.to_string()))?;
        from_hub::bring_for_run(&mut recipe, &self.recipe, requests)?;
        recipe.ranks = match (self.ranks, recipe.ranks) {
            (Some(ranks), _) => ranks,
            // Refused later, whatever else is asked for.
            (None, 0) => 0,
            (None, ranks) => ranks.max(self.ranks_asked_for()),
        };
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

    pub(super) fn overrides(&self) -> Vec<String> {
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
    fn ranks_asked_for(&self) -> u32 {
        // Experts are spread over ranks that see different samples, which there have to be.
        [self.pp, self.tp, self.sp, self.ep].into_iter().flatten().fold(1, u32::saturating_mul)
    }

    /// What they mean in a round of an elastic job: after the first, the run goes on from its own newest checkpoint.
    fn in_its_round(&self, folder: &RunFolder) -> Result<TrainArgs, Failure> {
        let round = std::env::var(ROUND_VARIABLE).ok().and_then(|round| round.parse::<u32>().ok());
        let mut args = self.clone();
        if round.is_some() && self.overwrite {
            let why = "--overwrite: an elastic job begins its run more than once, and would remove what it has trained itself; remove the folder, or give another --out";
            return Err(Failure::Usage(why.to_owned()));
        }
        let has_saved = std::fs::read_dir(folder.checkpoints()).is_ok_and(|mut found| found.next().is_some());
        if round.is_some_and(|round| round > 0) && (self.resume.is_none() || has_saved) {
            args.resume = Some("auto".to_owned());
            // Where the run's own states are, none begin anew.
            args.fresh_optimizer &= !has_saved;
        }
        Ok(args)
    }

    /// Where the run goes, as far as it is asked for: that of an earlier one it leaves alone later.
    fn folder(&self, recipe: &Recipe) -> RunFolder {
        let usual = RunFolder::at(PathBuf::from("runs").join(&recipe.name));
        match &self.out {
            Some(out) => RunFolder::at(out),
            None => self.resume().home(&usual, &recipe.name).unwrap_or(usual),
        }
    }

    pub(super) fn resume(&self) -> Resume {
        self.resume.as_deref().map_or(Resume::No, Resume::parse)
    }
}

/// Starts this program again, once per rank.
fn start_ranks(
    args: &TrainArgs,
    recipe: &Recipe,
    folder: &RunFolder,
    requests: &StopRequests,
) -> Result<ExitCode, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Run(format!("cannot find this program: {error}")))?;
    let words = train_words::of_ranks(args, recipe, folder);
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
    // Rank 0 writes it when all have met and loaded what they go on from.
    let begun = || folder.about().metadata().and_then(|about| about.modified()).ok();
    let before = begun();
    old_recorders::remove();
    // From here on the launcher hears signals itself.
    let heard = [(SIGINT, &requests.finish), (SIGTERM, &requests.leave)];
    job.signals = SignalHandling::ForwardSince(heard.map(|(signal, flag)| (signal, Arc::clone(flag))).into());
    let outcome = job.run()?;
    match &outcome {
        // The signal came as the ranks were ending: they had done all there was to do.
        JobOutcome::Interrupted { all_well: true, .. } => return Ok(ExitCode::SUCCESS),
        JobOutcome::Interrupted { signal: signal @ (SIGINT | SIGTERM | SIGHUP), .. } if begun() == before => {
            let ending = if *signal == SIGINT { Ending::Stopped } else { Ending::Left };
            return Err(train_start::stopped_before(ending));
        }
        // Rank 0 has said what it saved.
        JobOutcome::Failed(report) if report.ended.exit_code() == EXIT_SAVED => {}
        JobOutcome::Failed(report) => {
            report_failure(folder, &recipe.name, &report.to_string());
            print_error(&report.to_string());
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

/// What concerns the whole job every rank would say; one is enough. Of a rank 0 that does not come, the others tell.
fn start_log(rank: usize, standing: Standing) {
    let asked_for = format!("warn,{}=info", ferrospeed_comm::ASKED_FOR);
    let level = if rank == 0 { &asked_for } else { "error,ferrospeed_comm::rendezvous=warn" };
    let _ = tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| level.into()),
        )
        .with_ansi(Paint::for_stderr().is_on())
        .with_writer(WarningWriter { only_block: standing.draws_on_stdout() })
        .try_init();
}

fn run_rank(
    args: &TrainArgs,
    recipe: Recipe,
    folder: &RunFolder,
    world: World,
    requests: StopRequests,
    standing: Standing,
) -> Result<ExitCode, Failure> {
    if let Standing::Among(starter) = standing {
        starter.watch(&requests.leave)?;
    }
    let every = recipe.config().ok().and_then(|(config, _)| config.steps_per_print).unwrap_or(10).max(1);
    let rank = world.rank();
    let mut progress = TrainProgress::new(&recipe.name, recipe.steps, every, standing.draws_on_stdout());
    let job = Job {
        recipe: &recipe,
        path: &args.recipe,
        world: world.clone(),
        device: args.device.open()?,
        folder,
        folder_is_held: true,
        resume: args.resume(),
        fresh_optimizer: args.fresh_optimizer,
        requests,
        observing: if args.measure_observing { Observing::Alternating } else { Observing::Always },
        is_experiment: args.experiment,
        operands: super::doctor::operands(),
    };
    let summary = match ferrospeed_train::run(&job, &mut progress) {
        Ok(summary) => summary,
        Err(TrainError::StoppedAtOnce(ending)) if rank != 0 => {
            // Rank 0 says so for all.
            return leave_together(&world, ending);
        }
        Err(error @ TrainError::StoppedAtOnce(ending)) => {
            leave_together(&world, ending)?;
            return Err(train_start::failure(error));
        }
        Err(error) => return Err(train_start::failure(error)),
    };
    if rank == 0 {
        let more = summary.ending == Ending::Finished && recipe.epochs.is_none();
        let steps = more.then(|| recipe.steps.saturating_mul(2));
        // How many ranks there are is the launcher's business, where there is another one.
        let is_ours = matches!(standing, Standing::Alone) || std::env::var_os(LOOKED_AHEAD).is_some();
        let ranks = is_ours.then_some(recipe.ranks);
        let again = train_words::to_go_on(args, folder, ranks, steps);
        progress.conclude(&conclusion(&recipe, &summary, folder, &again));
    }
    leave_together(&world, summary.ending)
}

/// A rank that leaves with a code of its own is a failure to the launcher, so none leaves before all are done.
fn leave_together(world: &World, ending: Ending) -> Result<ExitCode, Failure> {
    if ending != Ending::Finished {
        world.group().barrier().map_err(|error| Failure::Run(error.to_string()))?;
    }
    Ok(ExitCode::from(exit_code(ending)))
}

/// What a run that ended so tells whoever started it.
pub(super) fn exit_code(ending: Ending) -> u8 {
    match ending {
        Ending::Finished => 0,
        Ending::Stopped => EXIT_INTERRUPTED,
        Ending::Left => EXIT_SAVED,
    }
}

/// SIGINT asks for the end of the step, a second one ends at once. SIGTERM, SIGHUP and SIGUSR2 ask to save and leave, however
/// often they come: a batch system may send them to the launcher and to the ranks.
fn watch_signals() -> Result<StopRequests, Failure> {
    let requests = StopRequests::default();
    // A terminal that is closed asks to save and leave, unless it was said (nohup) that the run outlives it.
    if !is_ignored(SIGHUP) {
        signal_hook::flag::register(SIGHUP, requests.leave.clone())
            .map_err(|error| Failure::Run(format!("cannot watch for signals: {error}")))?;
    }
    // In this order: the handler that ends at once sees the flag as the first signal left it.
    signal_hook::flag::register_conditional_shutdown(SIGINT, 128 + SIGINT, requests.finish.clone())
        .and_then(|_| signal_hook::flag::register(SIGINT, requests.finish.clone()))
        .and_then(|_| signal_hook::flag::register(SIGTERM, requests.leave.clone()))
        .and_then(|_| signal_hook::flag::register(SIGUSR2, requests.leave.clone()))
        .map_err(|error| Failure::Run(format!("cannot watch for signals: {error}")))?;
    Ok(requests)
}

/// What a person wants to know at the end; `again` is the command that goes on.
fn conclusion(recipe: &Recipe, summary: &Summary, folder: &RunFolder, again: &str) -> String {
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
    if summary.new_steps == 0 {
        text.push_str(&format!(
            "\nall {} steps were taken before: nothing is left to do\nweights  {}\ngo on    {again}\n",
            summary.steps,
            folder.model().display()
        ));
        return text;
    }
    let loss =
        summary.loss.map_or("none, nothing was to be predicted".to_owned(), |loss| format!("{loss:.4}"));
    text.push_str(&format!(
        "\n{how} {} steps in {:.1} s: loss {loss}{validation}; logs, progress and report took {:.2} % of it\nreport   {}\nlog      {}\n",
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
    if summary.checkpoint.is_some() {
        text.push_str(&format!("go on    {again}\n"));
    }
    text
}
