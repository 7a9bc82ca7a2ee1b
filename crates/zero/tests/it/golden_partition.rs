//! Who owns what, as DeepSpeed recorded it. Element `j` of parameter `i` holds `1000·(i+1) + j`.

use ferrospeed_placement::layout::{Layout, persistent};
use ferrospeed_testkit::golden::{golden, read_json};
use serde_json::Value;

fn numbers(value: &Value) -> Vec<usize> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as usize).collect()
}

fn names(params: &[usize]) -> Vec<String> {
    params.iter().map(|param| format!("p{param}")).collect()
}

fn recorded_names(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_owned()).collect()
}

fn floats(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
}

/// The content of elements `start..start + len` of a parameter; rounded as bf16 where the recording is.
fn content(param: usize, start: usize, len: usize, rounded: bool) -> Vec<f64> {
    let value = |j: usize| (1000 * (param + 1) + j) as f64;
    (start..start + len)
        .map(|j| if rounded { half::bf16::from_f64(value(j)).to_f64() } else { value(j) })
        .collect()
}

#[test]
fn golden_partitions_match_their_recordings() {
    golden().each_entry("zero/partition", ".json", 48, |path| {
        let case = read_json(path);
        let numels: Vec<usize> =
            case["shapes"].as_array().unwrap().iter().map(|shape| numbers(shape).iter().product()).collect();
        let groups: Vec<Vec<usize>> = match case["groups"].as_array() {
            Some(groups) => groups.iter().map(numbers).collect(),
            None => vec![(0..numels.len()).collect()],
        };
        match case["stage"].as_u64().unwrap() {
            3 => check_per_parameter(&case, &numels, &groups),
            _ => check_flat(&case, &numels, &groups),
        }
    });
}

fn check_flat(case: &Value, numels: &[usize], groups: &[Vec<usize>]) {
    let name = case["name"].as_str().unwrap();
    let ranks = case["world_size"].as_u64().unwrap() as usize;
    let rounded = case["bf16_optimizer"] == true;
    let round_robin = case["zero"]["round_robin_gradients"] == true;
    for (rank, recorded) in case["ranks"].as_array().unwrap().iter().enumerate() {
        for (params, recorded) in groups.iter().zip(recorded["groups"].as_array().unwrap()) {
            let group_numels: Vec<usize> = params.iter().map(|&param| numels[param]).collect();
            let layout = Layout::flat(&group_numels, ranks, round_robin);
            let what = format!("{name}, rank {rank}");
            assert_eq!(
                layout.part_numel * ranks,
                recorded["flat_numel"].as_u64().unwrap() as usize,
                "{what}"
            );
            let padding = if rank + 1 == ranks { layout.padding } else { 0 };
            assert_eq!(padding, recorded["group_padding"].as_u64().unwrap() as usize, "{what}");
            let order: Vec<usize> = layout.order.iter().map(|&index| params[index]).collect();
            if !recorded["flat_order"].is_null() {
                assert_eq!(names(&order), recorded_names(&recorded["flat_order"]), "{what}");
            }
            let mut part = vec![0.0; layout.part_numel];
            for (index, &param) in params.iter().enumerate() {
                let Some(fragment) = layout.fragment(index, rank) else { continue };
                let values = content(param, fragment.in_param, fragment.len, rounded);
                part[fragment.in_part..fragment.in_part + fragment.len].copy_from_slice(&values);
                // DeepSpeed's own mapping is wrong when parameters are dealt out in turn; its values are right.
                let mapping = &recorded["param_slice_mappings"][format!("p{param}")];
                if !round_robin && fragment.len > 0 {
                    assert_eq!(numbers(mapping), [fragment.in_part, fragment.len], "{what}, p{param}");
                }
            }
            assert_eq!(part, floats(&recorded["fp32_partition"]), "{what}");
        }
    }
}

fn check_per_parameter(case: &Value, numels: &[usize], groups: &[Vec<usize>]) {
    let name = case["name"].as_str().unwrap();
    let ranks = case["world_size"].as_u64().unwrap() as usize;
    let option = |key: &str, default: u64| case["zero"][key].as_u64().unwrap_or(default);
    for (rank, recorded) in case["ranks"].as_array().unwrap().iter().enumerate() {
        let what = format!("{name}, rank {rank}");
        // DeepSpeed cuts a group into sub-groups, one behind the other; here a whole group is one.
        let behind_each_other = |key: &str| -> Vec<Value> {
            let sub_groups = recorded["sub_groups"].as_array().unwrap();
            sub_groups.iter().flat_map(|one| one[key].as_array().unwrap().clone()).collect()
        };
        let order: Vec<usize> = groups.iter().flatten().copied().collect();
        assert_eq!(names(&order), recorded_names(&Value::from(behind_each_other("params"))), "{what}");
        let shares: Vec<usize> = order.iter().map(|&param| numels[param].div_ceil(ranks)).collect();
        assert_eq!(shares, numbers(&Value::from(behind_each_other("partition_numels"))), "{what}");
        let mut recorded_values = behind_each_other("real_values").into_iter();
        for params in groups {
            let group_numels: Vec<usize> = params.iter().map(|&param| numels[param]).collect();
            let layout = Layout::per_parameter(&group_numels, ranks);
            for (index, &param) in params.iter().enumerate() {
                let own = layout.fragment(index, rank);
                let own = own.map_or(Vec::new(), |f| content(param, f.in_param, f.len, false));
                assert_eq!(own, floats(&recorded_values.next().unwrap()), "{what}, p{param}");
            }
        }
        let stays = persistent(
            numels,
            option("stage3_param_persistence_threshold", 100_000),
            option("stage3_model_persistence_threshold", i64::MAX as u64),
        );
        let kept: Vec<usize> = (0..numels.len()).filter(|&param| stays[param]).collect();
        assert_eq!(names(&kept), recorded_names(&recorded["persist"]), "{what}");
    }
}
