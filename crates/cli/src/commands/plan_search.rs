//! `ferrospeed plan --search`: the fastest ways to lay a run out on its ranks, of those that fit, before anything is started.

use std::fmt::Write;
use std::num::NonZeroU64;
use std::path::Path;
use std::process::ExitCode;

use ferrospeed_command::{Failure, terminal};
use ferrospeed_config::{AutoValues, Config, DataType, Unresolved};
use ferrospeed_tensor::DType;
use ferrospeed_train::{FromHub, Recipe, TrainError, shape_of};
use ferrospeed_tune::cost::Rates;
use ferrospeed_tune::layout::{Layout, Offload, Open, Space};
use ferrospeed_tune::model::{Model, Transformer};
use ferrospeed_tune::plan::{Processor, Tier, human};
use ferrospeed_tune::search::{Answer, Found, Question, search};
use serde_json::{Value, json};

use super::config::refusal;
use super::from_hub;
use super::plan::{PlanArgs, capacity, with_experts_over};
use super::rates::Ranks;

/// Layouts that are shown.
const SHOWN: usize = 5;

/// What a search is about.
struct Subject {
    model: Transformer,
    read: Unresolved,
    auto: AutoValues,
    ranks: u64,
    sequence_length: u64,
    recomputes: bool,
    expert_ranks: u64,
    is_divided: bool,
}

impl Subject {
    fn read(args: &PlanArgs) -> Result<Subject, Failure> {
        if args.pp.is_some() || args.pp_schedule.is_some() {
            let why = "--search: pipeline stages are not searched; leave --pp and --pp_schedule out";
            return Err(Failure::Usage(why.to_owned()));
        }
        if args.input.recipe().is_some() && args.model.is_given() {
            let why = "--search: the recipe names the model; leave --model and --params out";
            return Err(Failure::Usage(why.to_owned()));
        }
        match args.input.recipe() {
            Some(path) => Subject::of_recipe(args, path),
            None => Subject::of_config(args),
        }
    }

    fn of_config(args: &PlanArgs) -> Result<Subject, Failure> {
        let Model::Transformer(model) = args.model.read()? else {
            let why = "--search: how a model can be cut follows from its shape; name it with --model";
            return Err(Failure::Usage(why.to_owned()));
        };
        let read = args.input.read().map_err(refusal)?;
        Ok(Subject {
            auto: AutoValues::new().with_hidden_size(model.hidden),
            ranks: args.world_size.map_or(1, NonZeroU64::get),
            sequence_length: args.sequence_length.map_or(model.max_positions, NonZeroU64::get),
            recomputes: args.checkpoint_activations,
            expert_ranks: args.ep.map_or(1, NonZeroU64::get),
            is_divided: args.ep.is_some_and(|ranks| ranks.get() > 1),
            model,
            read,
        })
    }

    fn of_recipe(args: &PlanArgs, path: &Path) -> Result<Subject, Failure> {
        let usage = |error: TrainError| Failure::Usage(error.to_string());
        let mut recipe = Recipe::load(path, args.input.overrides()).map_err(usage)?;
        from_hub::bring(&mut recipe, path, FromHub::ModelConfig)?;
        let mesh = recipe.mesh();
        if mesh.pipe.get() > 1 {
            let why = "--search: pipeline stages are not searched; leave out pipeline.stages";
            return Err(Failure::Usage(why.to_owned()));
        }
        let config = ferrospeed_train::model_config(&recipe, path).map_err(usage)?;
        let model =
            shape_of(&config).map_err(|error| Failure::Usage(format!("{}: {error}", path.display())))?;
        let (read, auto, _) = recipe.unresolved().map_err(refusal)?;
        Ok(Subject {
            model,
            read,
            auto,
            ranks: args.world_size.map_or(u64::from(recipe.ranks), NonZeroU64::get),
            sequence_length: args.sequence_length.map_or(recipe.data.sequence, NonZeroU64::get),
            recomputes: args.checkpoint_activations || recipe.model.activation_checkpointing,
            expert_ranks: mesh.expert.get() as u64,
            is_divided: mesh.expert.get() > 1,
        })
    }
}

pub(super) fn run(args: &PlanArgs) -> Result<ExitCode, Failure> {
    let subject = Subject::read(args)?;
    with_experts_over(subject.model, subject.expert_ranks)?;
    let mut ds_config = subject.read.source().clone();
    if let Some(slices) = args.tp {
        ds_config["tensor_parallel"]["autotp_size"] = slices.get().into();
    }
    if let Some(parts) = args.sp {
        ds_config["sequence_parallel_size"] = parts.get().into();
    }
    let resolve = |value: &Value, ranks: u64| -> Option<Config> {
        let read = Config::from_value("--search", value).ok()?;
        Some(read.resolve(NonZeroU64::new(ranks)?, &subject.auto).ok()?.0)
    };
    let space = |processor| {
        Space::left_open_by(&Open {
            ds_config: &ds_config,
            model: &subject.model,
            ranks: subject.ranks,
            sequence_length: subject.sequence_length,
            processor,
            recomputes: subject.recomputes,
            is_divided: subject.is_divided,
        })
    };
    // Any of them says which disk and precision are meant.
    let first = space(Processor::Cpu)
        .layouts(subject.ranks)
        .into_iter()
        .find_map(|layout| resolve(&layout.applied_to(&ds_config), layout.data_ranks(subject.ranks)));
    let first = first.ok_or_else(|| {
        let why = format!(
            "--search: no layout of {} rank(s) suits the configuration; `ferrospeed config check` says why",
            subject.ranks
        );
        Failure::Usage(why)
    })?;
    let capacity = capacity(args, &first, subject.ranks)?;
    let processor = if capacity.device_bytes.is_some() { Processor::Gpu } else { Processor::Cpu };
    let rates = args.rates.of(&Ranks {
        count: subject.ranks,
        per_host: capacity.ranks_per_host,
        processor,
        dtype: match first.precision.data_type() {
            DataType::Fp16 => DType::F16,
            DataType::Bf16 => DType::BF16,
            DataType::Fp32 => DType::F32,
        },
        are_here: args.is_about_this_machine(),
    })?;
    let question = Question {
        model: &subject.model,
        expert_ranks: subject.expert_ranks,
        ds_config: &ds_config,
        ranks: subject.ranks,
        sequence_length: subject.sequence_length,
        processor,
        operands: super::doctor::operands(),
        capacity,
        rates,
    };
    let answer = search(&question, &space(processor), resolve);
    let text = match args.json {
        true => as_json(&answer, &rates, subject.sequence_length),
        false => as_text(&answer, &rates, &subject),
    };
    terminal::print_output(&text)?;
    Ok(if answer.fitting.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A number with its thousands.
fn count(value: f64) -> String {
    let units = ["", "k", "M", "G", "T", "P"];
    let power = (value.max(1.0).log10() / 3.0) as usize;
    let power = power.min(units.len() - 1);
    format!("{:.1}{}", value / 1000f64.powi(power as i32), units[power])
}

fn mesh(layout: &Layout, ranks: u64) -> String {
    let sizes = [("dp", layout.data_ranks(ranks)), ("tp", layout.tensor), ("sp", layout.sequence)];
    let named = sizes.iter().filter(|(name, size)| *size > 1 || *name == "dp");
    named.map(|(name, size)| format!("{name}{size}")).collect::<Vec<_>>().join("×")
}

fn as_text(answer: &Answer, rates: &Rates, subject: &Subject) -> String {
    let mut text = format!(
        "{} layouts of {} rank(s): {} fit, {} are refused by the configuration's rules\n",
        answer.looked_at,
        subject.ranks,
        answer.fitting.len(),
        answer.refused
    );
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "by rates of one rank: {}FLOP/s, memory {}B/s{}{}",
        count(rates.flops_per_s),
        count(rates.memory_bytes_per_s),
        // Between ranks of which there is one, nothing is sent.
        if rates.wire_bytes_per_s.is_finite() {
            format!(", wire {}B/s", count(rates.wire_bytes_per_s))
        } else {
            String::new()
        },
        rates.link_bytes_per_s.map_or_else(String::new, |link| format!(", between hosts {}B/s", count(link)))
    );
    if let Some(nearest) = answer.nearest.as_ref().filter(|_| answer.fitting.is_empty()) {
        let _ = writeln!(text, "nothing fits; {} lacks least:", nearest.layout);
        for short in &nearest.shortfalls {
            let (needed, available) = (human(short.needed_bytes), human(short.available_bytes));
            let missing = human(short.needed_bytes.saturating_sub(short.available_bytes));
            let _ = writeln!(
                text,
                "  {} needs {needed}, there is {available}: {missing} are missing",
                short.tier
            );
        }
        return text;
    }
    let _ = writeln!(
        text,
        "\n{:<14} {:>5} {:>11} {:>9} {:>9} {:>11} {:>11} {:>10} {:>10} {:>8}",
        "mesh", "stage", "micro×steps", "recompute", "offload", "device", "host", "step", "tokens/s", "binds"
    );
    for found in answer.fitting.iter().take(SHOWN) {
        let layout = &found.layout;
        let offload = match layout.offload {
            Offload::AsConfigured => "-",
            Offload::Optimizer => "optimizer",
            Offload::Everything => "all",
        };
        let _ = writeln!(
            text,
            "{:<14} {:>5} {:>11} {:>9} {:>9} {:>11} {:>11} {:>10} {:>10} {:>8}",
            mesh(layout, subject.ranks),
            layout.stage,
            format!("{}×{}", layout.micro_batch, layout.accumulation),
            if layout.recompute { "yes" } else { "no" },
            offload,
            human(found.plan.total(Tier::Device)),
            human(found.plan.total(Tier::Host)),
            duration(found.time.total_s()),
            count(found.samples_per_s * subject.sequence_length as f64),
            found.time.binding()
        );
        let sent: Vec<String> = found
            .work
            .sent
            .iter()
            .map(|sent| format!("{} {}", sent.reason, human(sent.bytes as u64)))
            .collect();
        let sent = if sent.is_empty() { "nothing".to_owned() } else { sent.join(", ") };
        let _ = writeln!(text, "{:<14} a rank sends per step: {sent}", "");
    }
    text
}

/// A time in the unit that somebody would say it in.
fn duration(seconds: f64) -> String {
    match seconds {
        s if !s.is_finite() => "?".to_owned(),
        s if s < 1.0 => format!("{:.1} ms", 1e3 * s),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

fn as_json(answer: &Answer, rates: &Rates, sequence_length: u64) -> String {
    let shown = |found: &Found| {
        json!({
            "layout": found.layout,
            "ds_config": found.ds_config,
            "device_bytes": found.plan.total(Tier::Device),
            "host_bytes": found.plan.total(Tier::Host),
            "nvme_bytes": found.plan.total(Tier::Nvme),
            "sent": found.work.sent,
            "time": found.time,
            "step_s": found.time.total_s(),
            "binds": found.time.binding(),
            "tokens_per_s": found.samples_per_s * sequence_length as f64,
        })
    };
    let document = json!({
        "looked_at": answer.looked_at,
        "refused": answer.refused,
        "fit": answer.fitting.len(),
        "rates": rates,
        "best": answer.fitting.iter().take(SHOWN).map(shown).collect::<Vec<_>>(),
        "nearest": answer.nearest.as_ref().map(|found| json!({"layout": found.layout, "shortfalls": found.shortfalls})),
    });
    serde_json::to_string_pretty(&document).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn a_step_of_hours_is_told_in_hours() {
        let told = [0.0123, 8.0, 600.0, 8132.704].map(duration);
        assert_eq!(told, ["12.3 ms", "8.0 s", "10.0 min", "2.3 h"]);
    }
}
