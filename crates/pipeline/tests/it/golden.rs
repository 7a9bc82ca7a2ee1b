//! DeepSpeed's recorded partitions, schedules, names and messages.

use std::num::NonZeroUsize;

use ferrospeed_comm::ProcessTopology;
use ferrospeed_pipeline::PipelineError;
use ferrospeed_pipeline::boundary::{self, Form, TYPES};
use ferrospeed_pipeline::partition::{
    LayerSize, Method, owner, part, partition_balanced, partition_uniform, prefix_sum,
};
use ferrospeed_pipeline::schedule::{Kind, Schedule};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

fn number(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a count")) as usize
}

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap_or_else(|| panic!("{value} is not a list")).iter().map(number).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().map(|all| all.iter().filter_map(Value::as_f64).collect()).unwrap_or_default()
}

fn parts(case: &Value) -> NonZeroUsize {
    number(&case["num_parts"]).try_into().expect("a positive number")
}

#[test]
fn golden_partition_helpers() {
    golden().each_case("utils/partition.json", 45, |case| {
        let weights = floats(&case["weights"]);
        let as_floats = |boundaries: Vec<usize>| boundaries.into_iter().map(|b| b as f64).collect();
        let found: Vec<f64> = match case["fn"].as_str() {
            Some("uniform") => as_floats(partition_uniform(number(&case["num_items"]), parts(case))),
            Some("balanced") => as_floats(partition_balanced(&weights, parts(case))),
            Some("prefix_sum") => prefix_sum(&weights),
            other => panic!("unknown function {other:?}"),
        };
        assert_eq!(found, floats(&case["expect"]), "{case}");
    });
}

#[test]
fn golden_partition() {
    golden().each_case("pipeline/partition.json", 152, |case| {
        let found = match case["fn"].as_str() {
            Some("partition_uniform") => partition_uniform(number(&case["num_items"]), parts(case)),
            Some("partition_balanced") => partition_balanced(&floats(&case["weights"]), parts(case)),
            other => panic!("unknown function {other:?}"),
        };
        assert_eq!(found, numbers(&case["parts"]), "{case}");
    });
}

#[test]
fn golden_module_partition() {
    golden().each_case("pipeline/module_partition.json", 216, |case| {
        let names = case["layer_names"].as_array().expect("names");
        let counts = numbers(&case["trainable_param_counts"]);
        let layers: Vec<LayerSize> = names
            .iter()
            .zip(&counts)
            .map(|(name, count)| LayerSize {
                class: name.as_str().unwrap().into(),
                parameters: *count,
                measured: None,
            })
            .collect();
        let held = vec![1.0; number(&case["num_stages"])];
        let method: Result<Method, _> = case["method"].as_str().expect("a method").parse();
        match (method.and_then(|method| method.divide(&layers, &held)), case["error"].as_str()) {
            (Ok(found), None) => {
                assert_eq!(found, numbers(&case["parts"]), "{case}");
                let owners: Vec<usize> =
                    (0..layers.len()).map(|layer| owner(&found, layer).unwrap()).collect();
                assert_eq!(owners, numbers(&case["stage_owner"]), "{case}");
            }
            // Where DeepSpeed has a name and nothing behind it, layers are divided by what was measured of them.
            (Err(PipelineError::NotMeasured(_)), Some("NotImplementedError"))
                if case["method"] == "profile" => {}
            (Err(PipelineError::UnknownMethod { .. }), Some("NotImplementedError"))
            | (Err(PipelineError::NoMatch { .. }), Some("RuntimeError")) => {}
            (found, expected) => panic!("{found:?}, recorded {expected:?}: {case}"),
        }
    });
}

fn check_schedules(file: &str, known: usize, kind: Kind) {
    golden().each_case(file, known, |case| {
        let (stages, stage) = (number(&case["stages"]), number(&case["stage_id"]));
        let schedule = Schedule::new(kind, stages, number(&case["micro_batches"])).unwrap();
        assert_eq!(schedule.buffers[stage], number(&case["num_pipe_buffers"]), "{case}");
        assert_eq!(json!(schedule.lines(stage)), case["steps"], "{case}");
    });
}

#[test]
fn golden_schedule_train() {
    check_schedules("pipeline/schedule_train.json", 161, Kind::OneForwardOneBackward);
}

#[test]
fn golden_schedule_inference() {
    check_schedules("pipeline/schedule_inference.json", 161, Kind::Inference);
}

#[test]
fn golden_schedule_data_parallel() {
    check_schedules("pipeline/schedule_dataparallel.json", 4, Kind::DataParallel);
}

/// A single tensor travels as a tuple of one here, with its type, which DeepSpeed leaves out.
#[test]
fn golden_tensor_meta() {
    golden().each_case("pipeline/tensor_meta.json", 5, |case| {
        let tensors = case["tensors"].as_array().expect("tensors").iter();
        let forms: Vec<Form> = tensors
            .map(|tensor| Form {
                dtype: TYPES.iter().find(|name| tensor[1] == **name).expect("a known type"),
                sizes: numbers(&tensor[0]),
            })
            .collect();
        let found = boundary::encode(&forms).unwrap();
        assert_eq!(boundary::decode(&found).unwrap(), forms, "{case}");
        let recorded: Vec<i64> = case["int64_messages"]
            .as_array()
            .expect("messages")
            .iter()
            .flat_map(|message| message.as_array().expect("numbers").iter().filter_map(Value::as_i64))
            .collect();
        match case["kind"].as_str() {
            Some("tuple") => assert_eq!(found, recorded, "{case}"),
            Some("tensor") => assert_eq!(found[3..], recorded[1..], "{case}"),
            other => panic!("unknown kind {other:?}"),
        }
    });
    if let Some(document) = golden().json("pipeline/tensor_meta.json") {
        let ids = golden().named_rows("pipeline/tensor_meta.json", &document, "dtype_ids");
        let is_ours = |(id, name): (usize, &&str)| ids.get(*name).is_none_or(|found| *found == id);
        assert!(TYPES.iter().enumerate().all(is_ours), "{ids:?}");
    }
}

/// Slices of a boundary's tensor are cut as items are over parts.
#[test]
fn golden_partitioned_tensor() {
    golden().each_case("pipeline/partitioned_tensor.json", 40, |case| {
        let sizes = numbers(&case["shape"]);
        let numel = sizes.iter().product();
        let boundaries = partition_uniform(numel, parts(case));
        let own = part(&boundaries, number(&case["rank"]));
        let local: Vec<f64> = own.map(|value| value as f64).collect();
        assert_eq!(local, floats(&case["local_data"]), "{case}");
        assert_eq!(json!(numel.is_multiple_of(parts(case).get())), case["even_split"], "{case}");
        let meta = numbers(&case["meta"]);
        assert_eq!(boundaries, meta[meta.len() - boundaries.len()..], "{case}");
    });
}

/// The names of DeepSpeed's files come from the topology.
#[test]
fn golden_checkpoint_paths() {
    golden().each_case("pipeline/ckpt_paths.json", 2, |case| {
        let size = |name: &str| case["args"][name].as_u64().unwrap_or(1) as usize;
        let topology = match case["kind"].as_str() {
            Some("pd") => ProcessTopology::pipe_data(size("num_pp"), size("num_dp")),
            Some("pmd") => {
                let axes = ["pipe", "data", "model"].into_iter();
                ProcessTopology::new(axes.zip(["num_pp", "num_dp", "num_mp"].map(size)))
            }
            other => panic!("unknown kind {other:?}"),
        }
        .unwrap();
        let boundaries = numbers(&case["parts"]);
        for recorded in case["ranks"].as_array().expect("ranks") {
            let rank = number(&recorded["rank"]);
            let whole = topology.describe(rank, &["data"], "_", "-").unwrap();
            assert_eq!(json!(format!("ckpt/global_step5/module-{whole}")), recorded["prefix"], "{case}");
            let slice = topology.describe(rank, &["data", "pipe"], "_", "-").unwrap();
            let slice = if slice.is_empty() { slice } else { format!("-{slice}") };
            let files: Vec<String> = part(&boundaries, topology.coordinate(rank, "pipe").unwrap())
                .map(|layer| format!("ckpt/global_step5/layer_{layer:02}{slice}-model_states.pt"))
                .collect();
            assert_eq!(json!(files), recorded["layers"], "{case}");
        }
    });
}
