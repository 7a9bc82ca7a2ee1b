//! The report, letter by letter as DeepSpeed prints it.
//!
//! Where DeepSpeed fails this does not: a `module_depth` beyond the model's ends with the model, and a time of zero gives a
//! speed of zero.

use std::fmt::Write;
use std::path::Path;

use crate::error::{ObserveError, Result};
use crate::flops::Module;
use crate::flops::format::{NumberStyle, general, rounded};

/// The ranks of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ranks {
    /// All ranks.
    pub world_size: u64,
    /// Ranks with different data.
    pub data_parallel_size: u64,
    /// Ranks that share a model.
    pub model_parallel_size: u64,
    /// Samples of a micro-batch.
    pub micro_batch: u64,
    /// Whether experts are cut too; `None` for a model without experts.
    pub expert_tensor_parallelism: Option<bool>,
}

/// The parameters of a mixture's experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    /// On this rank.
    pub params: u64,
    /// In the model.
    pub model_params: u64,
}

/// The other phases of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Phases {
    /// Time of backward.
    pub backward_s: f64,
    /// Time of the optimizer.
    pub step_s: f64,
    /// Forward passes that backward repeats.
    pub recompute_fwd_factor: f64,
}

/// What stands above the modules.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// Which step.
    pub step: u64,
    /// The ranks, where a run is profiled and not a model alone.
    pub ranks: Option<Ranks>,
    /// Parameters of the model without its experts.
    pub model_params: u64,
    /// Operations of forward in all stages of a model that is cut into such.
    pub flops_of_stages: Option<u64>,
    /// Its experts.
    pub experts: Option<Experts>,
    /// Time of forward.
    pub forward_s: f64,
    /// The other phases, where they were timed.
    pub phases: Option<Phases>,
}

/// How much is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReportOptions {
    /// How deep the summary by class goes; -1 goes to the level above the last.
    pub module_depth: i64,
    /// Classes named per level.
    pub top_modules: u64,
    /// Whether the tree is printed.
    pub detailed: bool,
}

const HEADING: &str = "
-------------------------- DeepSpeed Flops Profiler --------------------------";

const NOTATIONS: &str = "Notations:
data parallel size (dp_size), model parallel size(mp_size),
number of parameters (params), number of multiply-accumulate operations(MACs),
number of floating-point operations (flops), floating-point operations per second (FLOPS),
fwd latency (forward propagation latency), bwd latency (backward propagation latency),
step (weights update latency), iter latency (sum of fwd, bwd and step latency)
";

const AGGREGATED: &str = "
----------------------------- Aggregated Profile per GPU -----------------------------";

const DETAILED: &str = "
------------------------------ Detailed Profile per GPU ------------------------------
Each module profile is listed after its name in the following order:\x20
params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd latency, fwd FLOPS

Note: 1. A module can have torch.nn.module or torch.nn.functional to compute logits (e.g. CrossEntropyLoss). They are not counted as submodules, thus not to be printed out. However they make up the difference between a parent's MACs (or latency) and the sum of its submodules'.
2. Number of floating-point operations is a theoretical estimation, thus FLOPS computed using that could be larger than the maximum system throughput.
3. The fwd latency listed in the top module's profile is directly captured at the module forward function in PyTorch, thus it's less than the fwd latency shown above which is captured in DeepSpeed.
";

/// The whole report. Writing to a string does not fail, so results of `write!` are of no interest here.
pub fn report(summary: &Summary, model: &Module, options: &ReportOptions) -> String {
    let mut text = format!("{HEADING}\nProfile Summary at step {}:\n{NOTATIONS}\n", summary.step);
    for (label, value) in lines(summary, model) {
        let _ = writeln!(text, "{label:<70}  {value:<8}");
    }
    let _ = writeln!(text, "{AGGREGATED}");
    text.push_str(&aggregated(model, options));
    if options.detailed {
        let _ = writeln!(text, "{DETAILED}\n{}", model.tree(model));
    }
    let _ = writeln!(text, "{}", "-".repeat(78));
    text
}

/// Writes a report to a file, in place of what is there, and makes the folders above it.
pub fn write_report(path: &Path, report: &str) -> Result<()> {
    if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        ferrospeed_files::create_folder(folder).map_err(ObserveError::io(folder))?;
    }
    ferrospeed_files::write(path, report).map_err(ObserveError::io(path))
}

fn lines(summary: &Summary, model: &Module) -> Vec<(String, String)> {
    let style = NumberStyle::default();
    let speed = |flops: f64, seconds: f64| style.flops(if seconds > 0.0 { flops / seconds } else { 0.0 });
    let flops = model.flops as f64;
    let model_parallel = summary.ranks.map_or(1, |ranks| ranks.model_parallel_size);
    let mut lines: Vec<(String, String)> = Vec::new();
    let mut line = |label: &str, value: String| lines.push((label.to_owned(), value));
    if let Some(ranks) = &summary.ranks {
        line("world size: ", ranks.world_size.to_string());
        line("data parallel size: ", ranks.data_parallel_size.to_string());
        line("model parallel size: ", ranks.model_parallel_size.to_string());
        line("batch size per GPU: ", ranks.micro_batch.to_string());
        if let Some(enabled) = ranks.expert_tensor_parallelism {
            line("expert tensor parallelism enabled: ", (if enabled { "True" } else { "False" }).to_owned());
        }
    }
    let params = |count: u64| style.params(count as f64);
    line("params per GPU: ", params(model.params + summary.experts.map_or(0, |experts| experts.params)));
    match summary.experts {
        Some(experts) => {
            line("params of model: ", params(summary.model_params + experts.model_params));
            line("   non-expert params of model: ", params(summary.model_params));
            line("   expert params of model: ", params(experts.model_params));
        }
        None if summary.flops_of_stages.is_some() => {
            line("params of model, all stages: ", params(summary.model_params));
        }
        None => line("params of model = params per GPU * mp_size: ", params(summary.model_params)),
    }
    line("fwd MACs per GPU: ", style.macs(model.macs as f64));
    line("fwd flops per GPU: ", style.number(flops));
    match summary.flops_of_stages {
        Some(flops) => line("fwd flops of model, all stages: ", style.number(flops as f64)),
        None => line(
            "fwd flops of model = fwd flops per GPU * mp_size: ",
            style.number(flops * model_parallel as f64),
        ),
    }
    line("fwd latency: ", style.duration(summary.forward_s));
    line("fwd FLOPS per GPU = fwd flops per GPU / fwd latency: ", speed(flops, summary.forward_s));
    let (Some(phases), Some(ranks)) = (&summary.phases, &summary.ranks) else { return lines };
    let backward = 2.0 + phases.recompute_fwd_factor;
    let both_s = summary.forward_s + phases.backward_s;
    let all_s = both_s + phases.step_s;
    let (b, all) = (general(backward), general(backward + 1.0));
    line("bwd latency: ", style.duration(phases.backward_s));
    let label = format!("bwd FLOPS per GPU = {b} * fwd flops per GPU / bwd latency: ");
    line(&label, speed(backward * flops, phases.backward_s));
    let label = format!("fwd+bwd FLOPS per GPU = {all} * fwd flops per GPU / (fwd+bwd latency): ");
    line(&label, speed((backward + 1.0) * flops, both_s));
    line("step latency: ", style.duration(phases.step_s));
    line("iter latency: ", style.duration(all_s));
    let label = format!("FLOPS per GPU = {all} * fwd flops per GPU / iter latency: ");
    line(&label, speed((backward + 1.0) * flops, all_s));
    // Ranks that hold slices or stages of one model share its samples.
    let samples = (ranks.micro_batch * ranks.data_parallel_size) as f64;
    let per_second = if all_s > 0.0 { rounded(samples / all_s, 2) } else { 0.0 };
    line("samples/second: ", format!("{per_second:?}"));
    lines
}

/// The sums of a class at one depth.
struct Class<'a> {
    name: &'a str,
    macs: u64,
    params: u64,
    seconds: f64,
}

fn collect<'a>(module: &'a Module, depth: usize, levels: &mut Vec<Vec<Class<'a>>>) {
    if levels.len() == depth {
        levels.push(Vec::new());
    }
    let level = &mut levels[depth];
    let at = level.iter().position(|class| class.name == module.class).unwrap_or_else(|| {
        level.push(Class { name: &module.class, macs: 0, params: 0, seconds: 0.0 });
        level.len() - 1
    });
    let class = &mut level[at];
    class.macs += module.macs;
    class.params += module.params;
    class.seconds += module.seconds;
    for child in module.children.iter().filter(|child| !child.is_repeated) {
        collect(child, depth + 1, levels);
    }
}

/// The classes of each level that took most parameters, operations and time.
pub fn aggregated(model: &Module, options: &ReportOptions) -> String {
    let mut levels = Vec::new();
    collect(model, 0, &mut levels);
    let shown = match usize::try_from(options.module_depth) {
        Ok(depth) => depth.min(levels.len()),
        Err(_) => levels.len() - 1,
    };
    let top = usize::try_from(options.top_modules).unwrap_or(usize::MAX);
    let style = NumberStyle::default();
    let mut text =
        format!("Top {top} modules in terms of params, MACs or fwd latency at different model depths:\n");
    for (depth, classes) in levels.iter().take(shown).enumerate() {
        let largest = |key: fn(&Class<'_>) -> f64, write: &dyn Fn(f64) -> String| {
            let mut order: Vec<&Class<'_>> = classes.iter().collect();
            order.sort_by(|a, b| key(b).total_cmp(&key(a)));
            let entries: Vec<String> = order
                .into_iter()
                .take(top)
                .map(|class| format!("'{}': '{}'", class.name, write(key(class))))
                .collect();
            format!("{{{}}}", entries.join(", "))
        };
        let params = largest(|class| class.params as f64, &|value| style.params(value));
        let macs = largest(|class| class.macs as f64, &|value| style.macs(value));
        let latency = largest(|class| class.seconds, &|value| style.duration(value));
        let _ = write!(
            text,
            "depth {depth}:\n    params      - {params}\n    MACs        - {macs}\n    fwd latency - {latency}\n"
        );
    }
    text
}
