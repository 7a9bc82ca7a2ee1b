//! `ferrospeed train --autotuning tune|run`: tries configurations of a recipe in short runs, and writes down the best.
//!
//! Which to try is a pure rule of `ferrospeed_tune::tuning`: by default ours, which begins where a model of costs and the
//! memory plan say it is best and measures at most ten; with `autotuning.method = "deepspeed"`, DeepSpeed's. Each run is a
//! process with a deadline and a limit of memory, so that none can hang or take the machine down; one that fails is an answer.
//! What was measured stays in `results_dir`, and with `overwrite: false` a search goes on where another ended.

mod folders;
mod laboratory;
mod settings;

use std::process::{Command, ExitCode};
use std::time::Instant;

use clap::ValueEnum;
use ferrospeed_command::Failure;
use ferrospeed_command::terminal::print_output;
use ferrospeed_launch::shell;
use ferrospeed_observe::report::{TriedPoint, Tuning, render_tuning};
use ferrospeed_tensor::DType;
use ferrospeed_train::{Expected, Recipe, RunFolder, StopRequests};
use ferrospeed_tune::layout::{Open, Space};
use ferrospeed_tune::model::Transformer;
use ferrospeed_tune::plan::{Capacity, Plan, Processor, Purpose};
use ferrospeed_tune::search::{self, Found, Question};
use ferrospeed_tune::tuning::planned::{self, Outcome};
use ferrospeed_tune::tuning::space::first_values;
use ferrospeed_tune::tuning::{Best, Experiment, Metric, ModelInfo, Records, deepspeed};
use serde_json::Value;

use super::rates::{Ranks, RateArgs};
use super::train::TrainArgs;
use super::train_memory;
use folders::Folders;
use laboratory::{Bench, Runs};
use settings::{Method, Settings};

/// What a search is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Autotuning {
    /// Search, and write the results.
    Tune,
    /// The same, then train with the best configuration.
    Run,
}

/// Runs of our own method, at most.
const MOST_RUNS: usize = 10;
/// The space of our own method in the table.
const PLANNED: &str = "planned";

/// Everything a search needs to know.
struct Search<'a> {
    args: &'a TrainArgs,
    recipe: Recipe,
    /// The ds_config as it was written: lists stand for choices.
    space: Value,
    settings: Settings,
    model: Transformer,
    /// Its `config.json`.
    model_config: Value,
    capacity: Capacity,
}

pub(super) fn run(args: &TrainArgs, mode: Autotuning) -> Result<ExitCode, Failure> {
    let start = Instant::now();
    let search = Search::new(args)?;
    let folders = Folders::open(&search.settings)?;
    let (records, tried) = search.records(&folders)?;
    let count = records.experiments().count();
    let summary = format!(
        "{}\n\nTuning completed in {}. Total number of experiments: {count}.\n",
        records.table(),
        duration(start.elapsed().as_secs_f64())
    );
    folders.write(&folders.results.join("summary.txt"), &summary)?;
    let _ = print_output(&format!("\n{summary}"));
    let best = records.best();
    let page = render_tuning(&Tuning {
        title: &format!("{}: autotuning", search.recipe.name),
        metric: search.settings.metric.key(),
        tried: &tried,
        best: best.as_ref().map(|best| best.experiment.name.as_str()),
        best_config: &best
            .as_ref()
            .map_or_else(String::new, |best| format!("{:#}", best.experiment.ds_config)),
    });
    folders.write(&folders.results.join("report.html"), &page)?;
    let Some(best) = best else {
        return Err(Failure::Run(format!(
            "no configuration ran; {} says of each why",
            folders.results.display()
        )));
    };
    let command = search.write_best(&folders, &best)?;
    if mode == Autotuning::Tune {
        return Ok(ExitCode::SUCCESS);
    }
    let (program, words) = command.split_first().ok_or_else(|| Failure::Run("no command".into()))?;
    let status = Command::new(program).args(words).status();
    let status = status.map_err(|error| Failure::Run(format!("cannot start {program}: {error}")))?;
    Ok(ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1)))
}

impl<'a> Search<'a> {
    fn new(args: &'a TrainArgs) -> Result<Search<'a>, Failure> {
        let usage = |why: String| Failure::Usage(why);
        let mut recipe = args.load_recipe(&StopRequests::default())?;
        let space = recipe.ds_config.clone();
        recipe.ds_config = first_values(&space);
        if let Some(zero) =
            recipe.ds_config.get_mut("zero_optimization").filter(|zero| zero["stage"] == "all")
        {
            zero["stage"] = 0.into();
        }
        let settings = Settings::read(&recipe.ds_config["autotuning"]).map_err(usage)?;
        Folders::check(&settings)?;
        // Everything that is wrong with the recipe is said before the first run; its text becomes tokens once.
        let is_text =
            recipe.data.text.is_some() || recipe.data.jsonl.is_some() || recipe.data.parquet.is_some();
        if is_text {
            recipe.data.cache.get_or_insert_with(|| settings.results_dir.join("data"));
        }
        let folder = RunFolder::at(settings.results_dir.join("profile_model_info"));
        let model_config =
            ferrospeed_train::check(&recipe, args.recipe(), &folder, &mut ferrospeed_train::unheard)
                .map_err(|error| usage(error.to_string()))?;
        let model = ferrospeed_train::shape_of(&model_config)
            .map_err(|error| usage(format!("autotuning: {error}")))?;
        let (config, _) = recipe.config().map_err(|error| usage(error.to_string()))?;
        let capacity = train_memory::capacity(u64::from(recipe.ranks), args.device(), &config)
            .ok_or_else(|| usage("autotuning: this host does not say how much memory it has".into()))?;
        Ok(Search { args, recipe, space, settings, model, model_config, capacity })
    }

    fn ranks(&self) -> u64 {
        u64::from(self.recipe.ranks)
    }

    /// Memory of one rank.
    fn rank_bytes(&self) -> u64 {
        self.capacity.device_bytes.unwrap_or(self.capacity.host_bytes / self.ranks().max(1))
    }

    /// What the search found, and every run in order.
    fn records(&self, folders: &Folders) -> Result<(Records, Vec<TriedPoint>), Failure> {
        let runs = Runs {
            args: self.args,
            recipe: &self.recipe,
            settings: &self.settings,
            // A rank that wants more than its share of the host's memory takes it from another.
            memory_bytes: self.capacity.host_bytes / self.ranks().max(1),
        };
        let mut bench = Bench::new(runs, folders);
        let records = match self.settings.method {
            Method::DeepSpeed => self.as_deepspeed(&mut bench),
            Method::Planned => self.by_plan(&mut bench),
        }?;
        Ok((records, bench.tried().to_vec()))
    }

    /// What a configuration of the recipe needs; `None` where it is refused.
    fn plan_of(&self, ds_config: &Value) -> Option<Plan> {
        let mut recipe = self.recipe.clone();
        recipe.ds_config = ds_config.clone();
        let operands = super::doctor::operands();
        Some(Expected::of(&recipe, &self.model_config, self.processor(), operands)?.plan)
    }

    fn processor(&self) -> Processor {
        if self.capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu }
    }

    fn as_deepspeed(&self, bench: &mut Bench<'_>) -> Result<Records, Failure> {
        let one = with_batch(&self.recipe.ds_config, 1, 1);
        let planned = self.plan_of(&one);
        let activations = planned.iter().flat_map(|plan| &plan.rows);
        let activations =
            activations.filter(|row| row.purpose == Purpose::Activations).map(|row| row.bytes).sum();
        let settings = &self.settings;
        let options = deepspeed::Options {
            metric: settings.metric,
            fast: settings.fast,
            max_train_batch_size: settings.max_train_batch_size,
            max_micro_batch: settings.max_micro_batch,
            min_micro_batch: settings.min_micro_batch,
            num_micro_batches: settings.num_micro_batches,
            model_parallel: settings.model_parallel,
            tuner: settings.tuner,
            ranks: self.recipe.data_ranks().get(),
            device_bytes: self.rank_bytes(),
            model: ModelInfo {
                parameters: settings.num_params.unwrap_or(self.model.size.total_params),
                activation_bytes: activations,
                hidden_size: settings.hidden_size.or(Some(self.model.hidden)),
            },
        };
        bench.note_model(&options.model)?;
        deepspeed::search(&self.space, &options, bench)
    }

    /// Our own method.
    fn by_plan(&self, bench: &mut Bench<'_>) -> Result<Records, Failure> {
        let fitting = self.fitting()?;
        let candidates: Vec<_> = fitting.iter().map(Found::candidate).collect();
        let mut records = Records::new(self.settings.metric);
        planned::search(&candidates, MOST_RUNS, |layout| {
            let found = fitting.iter().find(|found| found.layout == *layout);
            let ds_config = found.map_or(Value::Null, |found| found.ds_config.clone());
            let experiment = Experiment { name: layout.to_string(), ds_config };
            let outcome = bench.measure(&experiment, layout.recompute)?;
            records.note(PLANNED, &experiment, outcome.value());
            Ok::<_, Failure>(match (outcome, self.settings.metric) {
                // The search takes more for better.
                (Outcome::Measured(time), Metric::Latency) => Outcome::Measured(-time),
                (outcome, _) => outcome,
            })
        })?;
        Ok(records)
    }

    /// Every layout that the ds_config leaves open, that is not refused and that fits, fastest first by the model of costs.
    fn fitting(&self) -> Result<Vec<Found>, Failure> {
        let (settings, ranks, mesh) = (&self.settings, self.ranks(), self.recipe.mesh());
        let recomputes = self.recipe.model.activation_checkpointing;
        let mut space = Space::left_open_by(&Open {
            ds_config: &self.space,
            model: &self.model,
            ranks,
            sequence_length: self.recipe.data.sequence,
            processor: self.processor(),
            recomputes,
            is_divided: mesh.pipe.get() > 1 || mesh.expert.get() > 1,
        });
        let limit = settings.max_train_batch_size.unwrap_or(u64::MAX);
        space.micro_batches = (settings.min_micro_batch, settings.max_micro_batch.min(limit));
        let rates = RateArgs::guessed(&Ranks {
            count: ranks,
            per_host: ranks,
            processor: self.processor(),
            dtype: DType::F32,
            are_here: true,
        })?;
        let question = Question {
            model: &self.model,
            expert_ranks: mesh.expert.get() as u64,
            ds_config: &self.recipe.ds_config,
            ranks,
            sequence_length: self.recipe.data.sequence,
            processor: self.processor(),
            operands: super::doctor::operands(),
            capacity: self.capacity,
            rates,
        };
        let answer = search::search(&question, &space, |ds_config, _| {
            let mut recipe = self.recipe.clone();
            recipe.ds_config = ds_config.clone();
            let (config, _) = recipe.config().ok().filter(|_| recipe.problems().is_empty())?;
            (config.batch.train_batch_size.get() <= limit).then_some(config)
        });
        Ok(self.worth_a_run(answer.fitting))
    }

    /// Layouts whose run would not take minutes by the model of costs: one with a micro-batch that is far too large for the model says
    /// nothing that a smaller one does not. Where all are slow, all stay.
    fn worth_a_run(&self, fitting: Vec<Found>) -> Vec<Found> {
        const LONGEST_RUN_S: f64 = 60.0;
        let steps = (self.settings.end_profile_step + 1) as f64;
        let is_brief = |found: &Found| found.time.total_s() * steps <= LONGEST_RUN_S;
        match fitting.iter().any(is_brief) {
            true => fitting.into_iter().filter(is_brief).collect(),
            false => fitting,
        }
    }

    /// The best configuration, and the command that trains with it.
    fn write_best(&self, folders: &Folders, best: &Best) -> Result<Vec<String>, Failure> {
        let path = folders.results.join(folders::BEST_CONFIG);
        folders.write(&path, &format!("{:#}\n", best.experiment.ds_config))?;
        let program =
            std::env::current_exe().map_or_else(|_| "ferrospeed".into(), |path| path.display().to_string());
        let mut command = vec![program, "train".into(), self.args.recipe().display().to_string()];
        command.extend(self.args.words_besides_search(self.recipe.ranks));
        command.extend(["--set".into(), format!("ds_config={}", path.display())]);
        if recomputes(&best.experiment.name) {
            command.extend(["--set".into(), "model.activation_checkpointing=true".into()]);
        }
        folders.write(&folders.results.join(folders::BEST_COMMAND), &(shell::join(&command) + "\n"))?;
        let _ = print_output(&format!(
            "{} is the optimal setup after tuning. The exp result is at {}.\nds_config  {}\ntrain with {}\n",
            best.experiment.name,
            folders.result(&best.experiment.name).display(),
            path.display(),
            shell::join(&command)
        ));
        Ok(command)
    }
}

/// How the name of an experiment ends that computes layers again.
const RECOMPUTES: &str = "_ac";

fn recomputes(name: &str) -> bool {
    name.ends_with(RECOMPUTES)
}

fn with_batch(config: &Value, micro_batch: u64, accumulation: u64) -> Value {
    let mut config = config.clone();
    if let Some(config) = config.as_object_mut() {
        config.remove("autotuning");
        config.remove("train_batch_size");
    }
    config["train_micro_batch_size_per_gpu"] = micro_batch.into();
    config["gradient_accumulation_steps"] = accumulation.into();
    config
}

/// `H:MM:SS.ffffff`.
fn duration(seconds: f64) -> String {
    let whole = seconds as u64;
    let micros = (seconds.fract() * 1e6) as u64;
    format!("{}:{:02}:{:02}.{micros:06}", whole / 3600, whole / 60 % 60, whole % 60)
}
