//! Recorded memberships of topologies, grids and groups, and what ranks find out from their launchers.

use std::collections::BTreeMap;

use super::grid::PipelineGrid;
use super::support::on_threads;
use ferrospeed_comm::discover::{self, Discovered};
use ferrospeed_comm::layout::{self, ExpertGroups, ExpertOrder, RankLists};
use ferrospeed_comm::topology::{DATA, MODEL, PIPE};
use ferrospeed_comm::{Mesh, ProcessTopology};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

fn number(value: &Value) -> usize {
    value.as_u64().unwrap_or_else(|| panic!("{value} is not a count")) as usize
}

fn topology_of(case: &Value) -> ProcessTopology {
    let axes = case["axes"].as_array().unwrap().iter().map(|axis| axis.as_str().unwrap().to_owned());
    ProcessTopology::new(axes.zip(case["dims"].as_array().unwrap().iter().map(number))).unwrap()
}

fn point(value: &Value) -> Vec<(&str, usize)> {
    value.as_object().unwrap().iter().map(|(axis, value)| (axis.as_str(), number(value))).collect()
}

#[test]
fn golden_topology() {
    golden().each_case("pipeline/topology.json", 10, |case| {
        let topology = topology_of(case);
        let ranks = 0..topology.world_size();
        assert_eq!(json!(topology.world_size()), case["world_size"], "{case}");
        let coordinates: Vec<_> = ranks.clone().map(|rank| topology.coordinates(rank).unwrap()).collect();
        assert_eq!(json!(coordinates), case["coords"], "{case}");
        for (axis, dim) in case["get_dim"].as_object().unwrap() {
            assert_eq!(topology.dim(axis), number(dim), "{case}");
        }
        for (axis, lists) in case["axis_comm_lists"].as_object().unwrap() {
            assert_eq!(json!(topology.axis_comm_lists(axis)), *lists, "{axis} of {case}");
        }
        for (axis, lists) in case["axis_list"].as_object().unwrap() {
            for (index, list) in lists.as_array().unwrap().iter().enumerate() {
                assert_eq!(
                    json!(topology.axis_list(axis, index).unwrap()),
                    *list,
                    "{axis} {index} of {case}"
                );
            }
        }
        let describe = |omit: &[&str], inner: &str, outer: &str| -> Value {
            json!(
                ranks
                    .clone()
                    .map(|rank| topology.describe(rank, omit, inner, outer).unwrap())
                    .collect::<Vec<_>>()
            )
        };
        assert_eq!(describe(&["data", "pipe"], "_", "-"), case["rank_repr_default"], "{case}");
        assert_eq!(describe(&[], "_", "-"), case["rank_repr_omit_none"], "{case}");
        assert_eq!(describe(&[&topology.axes()[0]], "+", "/"), case["rank_repr_omit_first"], "{case}");
        for query in case["filter_match"].as_array().unwrap() {
            assert_eq!(
                json!(topology.filter(&point(&query["filter"])).unwrap()),
                query["ranks"],
                "{query} of {case}"
            );
        }
        for query in case["get_rank"].as_array().unwrap() {
            assert_eq!(
                topology.rank(&point(&query["coord"])).unwrap(),
                number(&query["rank"]),
                "{query} of {case}"
            );
        }
        for error in case["errors"].as_array().unwrap() {
            let full: Vec<(&str, usize)> = topology.axes().iter().map(|axis| (axis.as_str(), 0)).collect();
            let mut beyond = full.clone();
            beyond[0].1 = topology.dim(beyond[0].0);
            let failed = match error[0].as_str().unwrap() {
                "get_rank_partial" => topology.rank(&full[1..]).is_err(),
                "get_rank_out_of_range" => topology.rank(&beyond).is_err(),
                "get_coord_out_of_range" => topology.coordinates(topology.world_size()).is_err(),
                "get_axis_list_unknown_axis" => topology.axis_list("no such axis", 0).is_err(),
                "filter_match_unknown_axis" => topology.filter(&[("no such axis", 0)]).is_err(),
                other => panic!("unknown operation {other}"),
            };
            assert!(failed, "{error} of {case}");
        }
    });
}

#[test]
fn golden_grid() {
    golden().each_case("pipeline/grid.json", 10, |case| {
        let world_size: usize = case["dims"].as_array().unwrap().iter().map(number).product();
        let args = &case["args"];
        let grid_of = |rank: usize| match (args.get("num_mp"), args.get("num_pp")) {
            (Some(model), Some(pipe)) => {
                let topology =
                    [(PIPE, number(pipe)), (DATA, number(&args["num_dp"])), (MODEL, number(model))];
                PipelineGrid::new(ProcessTopology::new(topology).unwrap(), rank)
            }
            (None, Some(pipe)) => {
                let topology = ProcessTopology::pipe_data(number(pipe), number(&args["num_dp"])).unwrap();
                PipelineGrid::new(topology, rank)
            }
            _ => PipelineGrid::of_world(number(&args["world_size"]), rank),
        };
        let first = grid_of(0);
        assert_eq!(first.topology().world_size(), world_size, "{case}");
        assert_eq!(*first.topology(), topology_of(case), "{case}");
        assert_eq!(json!(first.group_creation_order()), case["group_creation_order"], "{case}");
        assert_eq!(json!(first.p2p_groups()), case["p2p_groups"], "{case}");
        for expected in case["ranks"].as_array().unwrap() {
            let grid = grid_of(number(&expected["rank"]));
            let stages: Vec<usize> =
                (0..grid.pipe_parallel_size()).map(|stage| grid.stage_to_global(stage)).collect();
            let actual = json!({
                "rank": expected["rank"],
                "stage_id": grid.stage_id(),
                "data_parallel_id": grid.data_parallel_id(),
                "is_first": grid.is_first_stage(),
                "is_last": grid.is_last_stage(),
                "model_group_ranks": grid.model_group(),
                "model_parallel_rank": grid.model_parallel_rank(),
                "model_parallel_world_size": grid.model_group().len(),
                "dp_group": grid.data_group(),
                "pp_group": grid.pipe_group(),
                "slice_group": grid.slice_group(),
                "slice_parallel_rank": grid.slice_parallel_rank(),
                "slice_parallel_world_size": grid.slice_parallel_size(),
                "stage_to_global": stages,
                "pipe_world": grid.pipe_parallel_size(),
                "data_world": grid.data_parallel_size(),
            });
            for (key, value) in expected.as_object().unwrap() {
                assert_eq!(actual[key], *value, "{key} of {expected}");
            }
        }
    });
}

fn order(flag: &Value) -> ExpertOrder {
    if flag.as_bool().unwrap() { ExpertOrder::DataBeforeExpert } else { ExpertOrder::ExpertBeforeData }
}

/// The groups in the order in which DeepSpeed makes them: expert-data groups first.
fn creation_order(groups: &ExpertGroups) -> RankLists {
    groups.expert_data.iter().chain(&groups.expert).cloned().collect()
}

/// The groups along each axis of a grid of blocks of `size` neighbours (at most the world), by the topology that ZeRO's meshes have:
/// within blocks, and across them.
fn blocks(world_size: usize, size: usize) -> Result<[RankLists; 2], String> {
    let size = size.min(world_size);
    if !world_size.is_multiple_of(size) {
        return Err(format!("{world_size} is not divisible by {size}"));
    }
    let topology = ProcessTopology::new([("across", world_size / size), ("within", size)]).unwrap();
    Ok(["within", "across"].map(|axis| topology.axis_comm_lists(axis)))
}

/// The groups of the two-level all-to-all and their names: one per host, then one per device's place where there are several.
fn two_levels(world_size: usize, devices_per_host: usize) -> Result<Value, String> {
    if (devices_per_host + 1..2 * devices_per_host).contains(&world_size) {
        return Err("one host and a part of another".to_owned());
    }
    let [hosts, places] = blocks(world_size, devices_per_host)?;
    let places = if hosts.len() == 1 { Vec::new() } else { places };
    let named =
        |kind: &str, count: usize| (0..count).map(|index| format!("{kind}_{index}")).collect::<Vec<_>>();
    let names = [named("local", hosts.len()), named("global", places.len())].concat();
    let groups = [hosts, places].concat();
    Ok(json!({"groups": groups, "names": names}))
}

#[test]
fn golden_utils_groups() {
    golden().each_case("utils/groups.json", 31, |case| {
        let given = |name: &str| number(&case[name]);
        let world = given("world_size");
        let result = match case["fn"].as_str().unwrap() {
            "expert_parallel_ranks" => layout::expert_tensor_parallel(
                world,
                given("tensor_parallel"),
                given("expert_parallel"),
                given("pipeline_parallel"),
                order(&case["data_before_expert"]),
            )
            .map(|groups| {
                json!({"expert_parallel": groups.expert, "expert_data_parallel": groups.expert_data})
            })
            .map_err(|error| error.to_string()),
            "create_expert_and_data_parallel" => layout::expert_parallel(
                world,
                given("expert_parallel"),
                given("pipeline_parallel"),
                order(&case["data_before_expert"]),
            )
            .map(|groups| json!(creation_order(&groups)))
            .map_err(|error| error.to_string()),
            "create_model_parallel" => {
                blocks(world, given("model_parallel")).map(|[within, across]| json!([across, within].concat()))
            }
            "create_zero_param_parallel_group" => {
                blocks(world, given("group_size")).map(|[within, _]| json!(within))
            }
            "local_all_to_all_groups" => two_levels(world, given("devices_per_node")),
            other => panic!("unknown function {other}"),
        };
        compare(case, result, case.get("error").map(|error| &error["message"]), case.get("expect"));
    });
}

/// Equal results, or an error on both sides; a divisibility error says the same numbers.
fn compare(case: &Value, result: Result<Value, String>, error: Option<&Value>, expect: Option<&Value>) {
    match (result, error) {
        (Ok(actual), None) => assert_eq!(actual, *expect.unwrap(), "{case}"),
        (Err(actual), Some(message)) => {
            let message = message.as_str().unwrap();
            if message.contains("is not divisible by") {
                assert!(actual.contains(message), "{actual} for {case}");
            }
        }
        (result, _) => panic!("{result:?} for {case}"),
    }
}

#[test]
fn golden_moe_groups() {
    golden().each_case("moe/groups.json", 16, |case| {
        let given = |name: &str| number(&case[name]);
        let order = order(&case["use_data_before_expert"]);
        let groups = match case["fn"].as_str().unwrap() {
            "no_expert_tensor_parallelism" => {
                layout::expert_parallel(given("world_size"), given("ep"), given("pp"), order)
            }
            "expert_tensor_parallel_enabled" => layout::expert_tensor_parallel(
                given("world_size"),
                given("tp"),
                given("ep"),
                given("pp"),
                order,
            ),
            other => panic!("unknown function {other}"),
        };
        let groups = match (groups, case.get("error")) {
            (Err(error), Some(message)) => {
                assert!(error.to_string().contains(message.as_str().unwrap()), "{error} for {case}");
                return;
            }
            (groups, None) => groups.unwrap(),
            (groups, _) => panic!("{groups:?} for {case}"),
        };
        for (key, value) in case.as_object().unwrap() {
            match key.as_str() {
                "creation_order" => assert_eq!(json!(creation_order(&groups)), *value, "{case}"),
                "expert_parallel_groups" => assert_eq!(json!(groups.expert), *value, "{case}"),
                "expert_data_parallel_groups" => assert_eq!(json!(groups.expert_data), *value, "{case}"),
                "ranks" => {
                    for member in value.as_array().unwrap() {
                        let rank = number(&member["rank"]);
                        let own = |lists: &RankLists| {
                            json!(lists.iter().find(|list| list.contains(&rank)).unwrap())
                        };
                        assert_eq!(own(&groups.expert), member["ep_group"], "{member} of {case}");
                        assert_eq!(own(&groups.expert_data), member["edp_group"], "{member} of {case}");
                    }
                }
                _ => {}
            }
        }
    });
}

#[test]
fn a_mesh_hands_out_the_groups_of_its_axes() {
    on_threads(8, |world| {
        let rank = world.rank();
        let topology =
            ProcessTopology::new([("pipe", 2), ("data", 2), ("sequence", 1), ("model", 2)]).unwrap();
        let mesh = Mesh::new(world, topology).unwrap();
        assert_eq!(mesh.data().unwrap().ranks(), [rank & !2, rank | 2]);
        assert_eq!(mesh.tensor().unwrap().ranks(), [rank & !1, rank | 1]);
        assert_eq!(mesh.pipe().unwrap().ranks(), [rank & !4, rank | 4]);
        assert_eq!(mesh.sequence().unwrap().ranks(), [rank]);
        assert_eq!(mesh.sequence_data().unwrap().ranks(), mesh.data().unwrap().ranks());
        let model: Vec<usize> = (0..8).filter(|other| other & 2 == rank & 2).collect();
        assert_eq!(mesh.model_parallel().unwrap().ranks(), model);
        let expert = mesh.expert(2, ExpertOrder::default()).unwrap();
        assert_eq!((expert.expert.size(), expert.expert_data.size()), (2, 1));
        let again = mesh.expert(2, ExpertOrder::default()).unwrap();
        assert_eq!(again.expert.ranks(), expert.expert.ranks());
        let mut value = [rank as i64];
        mesh.model_parallel().unwrap().all_reduce(&mut value, ferrospeed_comm::ReduceOp::Sum).unwrap();
        assert_eq!(value[0], model.iter().sum::<usize>() as i64);
    });
}

#[test]
fn a_mesh_that_does_not_fill_the_world_is_refused() {
    let error =
        Mesh::new(ferrospeed_comm::World::solo(), ProcessTopology::pipe_data(2, 1).unwrap()).unwrap_err();
    assert!(error.to_string().contains("pipe 2 × data 1 make 2 ranks, but the world has 1"), "{error}");
}

#[test]
fn golden_logger_numbers() {
    use ferrospeed_comm::logger::{bandwidth, readable_bytes, trimmed_mean};
    let close = |actual: f64, expected: &Value| match expected.as_str() {
        Some("nan") => actual.is_nan(),
        Some(other) => panic!("unknown number {other}"),
        None => (actual - expected.as_f64().unwrap()).abs() <= 1e-9 * actual.abs().max(1.0),
    };
    let ours =
        |case: &Value| matches!(case["fn"].as_str(), Some("trim_mean" | "convert_size" | "calc_bw_log"));
    golden().each_case_of("utils/misc.json", 28, ours, |case| {
        let (args, expect) = (&case["args"], &case["expect"]);
        match case["fn"].as_str().unwrap() {
            "trim_mean" => {
                let data: Vec<f64> =
                    args["data"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
                assert!(close(trimmed_mean(&data, args["trim"].as_f64().unwrap()), expect), "{case}");
            }
            "convert_size" => {
                assert_eq!(json!(readable_bytes(args["bytes"].as_u64().unwrap())), *expect, "{case}")
            }
            "calc_bw_log" => {
                let (op, bytes) = (args["op"].as_str().unwrap(), number(&args["bytes"]));
                let actual =
                    bandwidth(op, bytes, args["duration_ms"].as_f64().unwrap(), number(&args["world_size"]));
                assert!(
                    close(actual.algorithm_gbps, &expect[0]) && close(actual.bus_gbps, &expect[1]),
                    "{case}"
                );
            }
            other => panic!("{other} is compared elsewhere"),
        }
    });
}

#[test]
fn golden_env_discovery() {
    golden().each_case("launcher/env_discovery.json", 11, |case| {
        let variables: BTreeMap<String, String> = serde_json::from_value(case["env"].clone()).unwrap();
        let env = |name: &str| variables.get(name).cloned();
        let found: Result<Value, ferrospeed_comm::Error> = match case["kind"].as_str().unwrap() {
            "mpich_helper" => discover::mpich_ranks(&env).map(
                |(rank, local_rank)| json!({"RANK": rank.to_string(), "LOCAL_RANK": local_rank.to_string()}),
            ),
            "azureml" => discover::azureml(&env).map(|found| as_variables(&found)),
            "sagemaker" => discover::sagemaker(&env).map(|found| as_variables(&found)),
            kind => panic!("unknown kind {kind}"),
        };
        match case.get("error").is_some() {
            true => {
                assert!(matches!(found, Err(ferrospeed_comm::Error::Discovery { .. })), "{case}: {found:?}")
            }
            // A rank may be left without MASTER_ADDR there; here that is refused, naming what is missing.
            false if case["expect"].get("MASTER_ADDR").is_some_and(Value::is_null) => {
                assert!(found.is_err(), "{case}");
            }
            false => assert_eq!(found.unwrap(), case["expect"], "{case}"),
        }
    });
}

fn as_variables(found: &Discovered) -> Value {
    json!({
        "RANK": found.rank.to_string(),
        "LOCAL_RANK": found.local_rank.map(|rank| rank.to_string()),
        "WORLD_SIZE": found.world_size.to_string(),
        "MASTER_ADDR": found.master_addr,
        "MASTER_PORT": found.master_port.to_string(),
        "NCCL_SOCKET_IFNAME": found.nccl_socket_interface,
    })
}
