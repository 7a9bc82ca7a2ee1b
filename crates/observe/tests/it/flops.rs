//! Numbers, estimates and reports against those that DeepSpeed's profiler gave.

use super::formulas::{self, Convolution, Cost, Padding, Recurrence};
use ferrospeed_observe::flops::format::NumberStyle;
use ferrospeed_observe::flops::{Module, Phases, Ranks, ReportOptions, Summary, report, write_report};
use ferrospeed_testkit::cases::Cases;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

#[test]
fn golden_numbers_are_written_as_recorded() {
    golden().each_case("flops/number_format.json", 673, |case| {
        let number = case["num"].as_f64().unwrap();
        let precision = case["precision"].as_u64().unwrap() as usize;
        let style = NumberStyle { units: case["units"].as_str(), precision };
        let written = [
            ("number", style.number(number)),
            ("flops", style.flops(number)),
            ("macs", style.macs(number)),
            ("params", style.params(number)),
            ("duration", style.duration(number)),
            ("bytes", style.bytes(number)),
        ];
        for (what, written) in written {
            // A case in billions of parameters has been recorded for parameters alone.
            if let Some(expected) = case.get(what) {
                assert_eq!(Some(&*written), expected.as_str(), "{what} of {case}");
            }
        }
    });
}

fn shape(value: &Value) -> Option<Vec<u64>> {
    value["shape"].as_array().map(|sizes| sizes.iter().map(|size| size.as_u64().unwrap()).collect())
}

fn convolution(case: &Value, dims: usize) -> Convolution {
    let kwargs = &case["kwargs"];
    let sizes = |value: &Value, default: u64| match value {
        Value::Array(sizes) => sizes.iter().map(|size| size.as_u64().unwrap()).collect(),
        value => vec![value.as_u64().unwrap_or(default); dims],
    };
    let padding = match kwargs["padding"].as_str() {
        Some("valid") => Padding::Valid,
        Some("same") => Padding::Same,
        Some(other) => panic!("padding {other}"),
        None => Padding::Sizes(sizes(&kwargs["padding"], 0)),
    };
    Convolution {
        stride: sizes(&kwargs["stride"], 1),
        padding,
        dilation: sizes(&kwargs["dilation"], 1),
        groups: kwargs["groups"].as_u64().unwrap_or(1),
    }
}

fn estimate(case: &Value) -> Cost {
    let args = case["args"].as_array().unwrap();
    let shapes: Vec<Option<Vec<u64>>> = args.iter().map(shape).collect();
    let at = |index: usize| shapes[index].as_deref().unwrap_or_else(|| panic!("{case} has no such operand"));
    let has = |index: usize| shapes.get(index).is_some_and(Option::is_some);
    match case["op"].as_str().unwrap() {
        "linear" => formulas::linear(at(0), at(1)),
        "matmul" => formulas::matmul(at(0), at(1)),
        "addmm" => formulas::addmm(at(0), at(1), at(2)),
        "sdpa" => formulas::attention(at(0), at(1), at(2)),
        "add" | "mul" => formulas::elementwise(shapes[0].as_deref(), shapes[1].as_deref()),
        "layer_norm" => formulas::norm(at(0), has(2)),
        "batch_norm" => formulas::batch_norm(at(0), has(3), case["kwargs"]["training"] == true),
        "upsample" => match &case["kwargs"]["size"] {
            Value::Array(size) => {
                formulas::upsample_to(&size.iter().map(|size| size.as_u64().unwrap()).collect::<Vec<_>>())
            }
            _ => formulas::upsample_by(at(0), case["kwargs"]["scale_factor"].as_f64().unwrap()),
        },
        "conv" => formulas::conv(at(0), at(1), has(2), &convolution(case, at(0).len() - 2)).unwrap(),
        "conv_transpose" => {
            formulas::conv_transpose(at(0), at(1), has(2), &convolution(case, at(0).len() - 2)).unwrap()
        }
        "einsum" => {
            let shapes: Vec<&[u64]> = shapes[1..].iter().map(|shape| shape.as_deref().unwrap()).collect();
            formulas::einsum(args[0].as_str().unwrap(), &shapes).unwrap()
        }
        other => panic!("op {other} is not known"),
    }
}

#[test]
fn golden_ops_are_estimated_as_recorded() {
    golden().each_case("flops/op_formulas.json", 88, |case| {
        let expected = Cost { flops: case["flops"].as_u64().unwrap(), macs: case["macs"].as_u64().unwrap() };
        assert_eq!(estimate(case), expected, "{case}");
    });
}

/// A module as PyTorch prints it.
struct Printed {
    name: String,
    class: String,
    sizes: String,
    children: Vec<Printed>,
}

fn parse(lines: &mut std::iter::Peekable<std::str::Lines<'_>>) -> Vec<Printed> {
    let line = lines.next().expect("a module").trim();
    let (names, text) = match line.strip_prefix('(').and_then(|rest| rest.split_once("): ")) {
        Some((name, text)) => (name, text),
        None => ("", line),
    };
    // `(0-1): 2 x Block(` stands for two equal modules.
    let (names, text) = match text.split_once(" x ") {
        Some((count, text)) if count.parse::<u64>().is_ok() => {
            let (first, last) = names.split_once('-').expect("a range of names");
            let (first, last): (u64, u64) = (first.parse().unwrap(), last.parse().unwrap());
            ((first..=last).map(|name| name.to_string()).collect(), text)
        }
        _ => (vec![names.to_owned()], text),
    };
    let (class, rest) = text.split_once('(').expect("a class");
    if let Some(sizes) = rest.strip_suffix(')') {
        let leaf = |name| Printed { name, class: class.into(), sizes: sizes.into(), children: Vec::new() };
        return names.into_iter().map(leaf).collect();
    }
    let mut children = Vec::new();
    while lines.peek().expect("a closing bracket").trim() != ")" {
        children.extend(parse(lines));
    }
    lines.next();
    let copy = |name| Printed { name, class: class.into(), sizes: String::new(), children: clone(&children) };
    names.into_iter().map(copy).collect()
}

fn clone(modules: &[Printed]) -> Vec<Printed> {
    let copy = |module: &Printed| Printed {
        name: module.name.clone(),
        class: module.class.clone(),
        sizes: module.sizes.clone(),
        children: clone(&module.children),
    };
    modules.iter().map(copy).collect()
}

/// A clock that moves on by a millisecond whenever it is read.
struct Clock(f64);

impl Clock {
    fn read(&mut self) -> f64 {
        self.0 += 0.001;
        self.0
    }
}

/// DeepSpeed measures neither recurrent modules nor lists, which are never called.
fn is_timed(class: &str) -> bool {
    !matches!(class, "RNN" | "GRU" | "LSTM" | "RNNCell" | "GRUCell" | "LSTMCell" | "ModuleList")
}

fn build(printed: &Printed, counts: &Value, clock: &mut Clock) -> Module {
    let is_timed = is_timed(&printed.class);
    let start = if is_timed { clock.read() } else { 0.0 };
    let mut children: Vec<Module> = Vec::new();
    for child in &printed.children {
        let found = counts["children"]
            .as_array()
            .unwrap()
            .iter()
            .find(|counts| counts["name"] == child.name.as_str());
        match found {
            Some(counts) => children.push(build(child, counts, clock)),
            None => {
                // The same module under a second name: each of its calls adds to the one time it has.
                let original = children.iter_mut().rfind(|other| other.class == child.class).unwrap();
                let start = clock.read();
                original.seconds += clock.read() - start;
                let (original, name) = (original.clone(), child.name.clone());
                children.push(Module { name, is_repeated: true, ..original });
            }
        }
    }
    let below = children.iter().fold(0.0, |sum, child| sum + child.seconds);
    Module {
        name: printed.name.clone(),
        class: printed.class.clone(),
        sizes: printed.sizes.clone(),
        params: counts["params"].as_u64().unwrap(),
        macs: counts["macs"].as_u64().unwrap(),
        flops: counts["flops"].as_u64().unwrap(),
        seconds: if is_timed { clock.read() - start } else { below },
        is_list: printed.class == "ModuleList",
        is_repeated: false,
        children,
    }
}

/// Compares every recorded profile. `known` is how many the default set holds.
fn each_profile(known: usize, compare: impl Fn(&str, &Value)) {
    let Some(profiles) = golden().json("flops/profiles.json") else { return };
    let mut cases = Cases::of("flops/profiles.json");
    for (name, profile) in profiles.as_object().unwrap() {
        cases.check(name, || compare(name, profile));
    }
    cases.finish(&golden(), known);
}

#[test]
fn golden_reports_are_printed_to_the_letter() {
    each_profile(7, |name, profile| {
        let Some(path) = golden().path(&format!("flops/report_{name}.txt")) else { return };
        let mut lines = profile["repr"].as_str().unwrap().lines().peekable();
        let printed = parse(&mut lines).pop().unwrap();
        let model = build(&printed, &profile["tree"], &mut Clock(0.0));
        let summary = Summary {
            step: 1,
            ranks: None,
            // A model without an engine has none for DeepSpeed.
            model_params: 0,
            flops_of_stages: None,
            experts: None,
            forward_s: model.seconds,
            phases: None,
        };
        let options = ReportOptions { module_depth: -1, top_modules: 2, detailed: true };
        let expected = std::fs::read_to_string(&path).unwrap();
        assert_eq!(report(&summary, &model, &options), expected, "{name}");
        let style = NumberStyle::default();
        assert_eq!(
            [
                style.number(model.flops as f64),
                style.macs(model.macs as f64),
                style.params(model.params as f64)
            ],
            [0, 1, 2].map(|index| profile["get_model_profile"][index].as_str().unwrap().to_owned()),
            "{name}"
        );
    });
}

/// What recurrent modules cost, from what PyTorch prints of them: `RNN(10, 12, num_layers=2, batch_first=True)`.
#[test]
fn golden_recurrent_modules_are_estimated_as_recorded() {
    let Some(profiles) = golden().json("flops/profiles.json") else { return };
    let mut cases = Cases::of("flops/profiles.json");
    for (name, profile) in profiles.as_object().unwrap() {
        let printed = parse(&mut profile["repr"].as_str().unwrap().lines().peekable()).pop().unwrap();
        let input = &profile["input_shapes"][0];
        for child in
            printed.children.iter().filter(|child| child.class != "ModuleList" && !is_timed(&child.class))
        {
            cases.check(format!("{name}.{}", child.name), || {
                let kind = match child.class.trim_end_matches("Cell") {
                    "RNN" => Recurrence::Rnn,
                    "GRU" => Recurrence::Gru,
                    _ => Recurrence::Lstm,
                };
                let sizes: Vec<&str> = child.sizes.split(", ").collect();
                let (inputs, hidden): (u64, u64) = (sizes[0].parse().unwrap(), sizes[1].parse().unwrap());
                let layers = sizes.iter().find_map(|size| size.strip_prefix("num_layers="));
                let layers: u64 = layers.map_or(1, |layers| layers.parse().unwrap());
                let directions = if sizes.contains(&"bidirectional=True") { 2 } else { 1 };
                let steps = if child.class.ends_with("Cell") { 1 } else { input[1].as_u64().unwrap() };
                let step = |layer: u64| {
                    let inputs = if layer == 0 { inputs } else { directions * hidden };
                    formulas::recurrent_step(kind, inputs, hidden, !sizes.contains(&"bias=False"))
                };
                let flops =
                    (0..layers).map(step).sum::<u64>() * input[0].as_u64().unwrap() * steps * directions;
                let counts = profile["tree"]["children"].as_array().unwrap();
                let counts = counts.iter().find(|counts| counts["name"] == child.name.as_str()).unwrap();
                assert_eq!(Some(flops), counts["flops"].as_u64());
            });
        }
    }
    cases.finish(&golden(), 6);
}

/// The recorded report of a run has real times in it: what does not depend on them is compared.
#[test]
fn golden_report_of_a_run_has_the_recorded_lines() {
    let Some(path) = golden().path("flops/report_engine_example.txt") else { return };
    let expected = std::fs::read_to_string(path).unwrap();
    let leaf = |name: &str, class: &str, sizes: &str, params: u64, macs: u64, flops: u64| Module {
        name: name.into(),
        class: class.into(),
        sizes: sizes.into(),
        params,
        macs,
        flops,
        seconds: 0.001,
        ..Module::default()
    };
    let net = Module {
        children: vec![
            leaf("0", "Linear", "in_features=16, out_features=32, bias=True", 544, 4096, 8192),
            leaf("1", "GELU", "approximate='none'", 0, 0, 256),
            leaf("2", "Linear", "in_features=32, out_features=4, bias=True", 132, 1024, 2048),
        ],
        ..leaf("net", "Sequential", "", 676, 5120, 10496)
    };
    let model = Module {
        children: vec![net, leaf("loss", "MSELoss", "", 0, 0, 0)],
        ..leaf("", "M", "", 676, 5120, 10496)
    };
    let summary = Summary {
        step: 3,
        ranks: Some(Ranks {
            world_size: 1,
            data_parallel_size: 1,
            model_parallel_size: 1,
            micro_batch: 8,
            expert_tensor_parallelism: None,
        }),
        model_params: 676,
        flops_of_stages: None,
        experts: None,
        forward_s: 0.007,
        phases: Some(Phases { backward_s: 0.014, step_s: 0.0006, recompute_fwd_factor: 1.0 }),
    };
    let options = ReportOptions { module_depth: -1, top_modules: 1, detailed: true };
    let printed = report(&summary, &model, &options);
    assert_eq!(printed.lines().count(), expected.lines().count(), "{printed}");
    for (printed, expected) in printed.lines().zip(expected.lines()) {
        // Times, what is divided by them, and what they are divided by.
        let without_times = |line: &str| {
            let by_time = |part: &str| {
                part.contains("latency -") || part.contains("% latency") || part.ends_with("FLOPS")
            };
            let line = match line
                .split_once(": ")
                .filter(|(label, _)| label.contains("atency") || label.contains("second"))
            {
                Some((label, _)) => label,
                None => line,
            };
            line.split(", ").filter(|part| !by_time(part)).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(without_times(printed), without_times(expected));
    }
}

#[test]
fn samples_that_ranks_share_are_counted_once() {
    let model = Module { class: "Root".into(), ..Module::default() };
    let ranks = Ranks {
        world_size: 8,
        data_parallel_size: 2,
        model_parallel_size: 4,
        micro_batch: 3,
        expert_tensor_parallelism: None,
    };
    let phases = Some(Phases { backward_s: 0.25, step_s: 0.25, recompute_fwd_factor: 0.0 });
    let summary = Summary {
        step: 1,
        ranks: Some(ranks),
        model_params: 0,
        flops_of_stages: None,
        experts: None,
        forward_s: 0.5,
        phases,
    };
    let printed =
        report(&summary, &model, &ReportOptions { module_depth: -1, top_modules: 1, detailed: false });
    let line = printed.lines().find(|line| line.starts_with("samples/second")).unwrap();
    assert!(line.trim_end().ends_with(" 6.0"), "{line}");
}

#[test]
fn a_depth_beyond_the_model_ends_with_the_model() {
    let leaf = Module { name: "a".into(), class: "Leaf".into(), ..Module::default() };
    let model = Module { class: "Root".into(), children: vec![leaf], ..Module::default() };
    let summary = Summary {
        step: 1,
        ranks: None,
        model_params: 0,
        flops_of_stages: None,
        experts: None,
        forward_s: 0.0,
        phases: None,
    };
    let depths = |module_depth| {
        let options = ReportOptions { module_depth, top_modules: 1, detailed: false };
        report(&summary, &model, &options).lines().filter(|line| line.starts_with("depth ")).count()
    };
    assert_eq!([-1, 0, 1, 2, 9].map(depths), [1, 0, 1, 2, 2]);
}

#[test]
fn a_report_is_written_below_folders_that_did_not_exist() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a/b/profile.txt");
    write_report(&path, "first").unwrap();
    write_report(&path, "second").unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "second");
    let error = write_report(&path.join("c"), "third").unwrap_err().to_string();
    assert!(error.contains("profile.txt"), "{error}");
}
