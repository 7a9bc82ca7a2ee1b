//! The recorded cases of hostfiles, filters, world info, core binding and node counts.
//!
//! [`OURS`] lists where we differ on purpose; everything else must match.

use ferrospeed_launch::filter::ActiveSlots;
use ferrospeed_launch::hostfile::HostPool;
use ferrospeed_launch::{LaunchError, cores, filter, hostfile, node_count, world_info};
use ferrospeed_testkit::golden::golden;
use serde_json::{Value, json};

/// Where we do the right thing and the recording shows a defect: what the recording did, and what we do.
const OURS: [(&str, &str); 4] = [
    ("slots=4x is read as 4", "the line is refused: letters behind the count are a mistake"),
    ("host names may hold anything, slot counts may be absurd", "refused before they reach a command line"),
    ("excluding a slot twice fails with list.remove", "it is the same as excluding it once"),
    ("node counts may be negative, or MAX below MIN", "refused"),
];

/// Compares a result with a case's `expect` or `error`; gives whether the recording holds an error.
fn expects_error(case: &Value) -> bool {
    match (case.get("expect").is_some(), case.get("error").is_some()) {
        (true, false) => false,
        (false, true) => true,
        _ => panic!("case {} holds neither or both of expect and error", case["id"]),
    }
}

#[test]
fn golden_hostfile() {
    golden().each_case("launcher/hostfile.json", 22, |case| {
        let text = case["hostfile"].as_str().unwrap();
        let parsed = hostfile::parse(text);
        if expects_error(case) {
            let message = case["error"]["message"].as_str().unwrap_or_default();
            let error = parsed.expect_err(&format!("{case}"));
            match () {
                _ if message.contains("multiple entries") => {
                    assert!(matches!(error, LaunchError::HostfileDuplicate { .. }), "{case}: {error}");
                }
                _ if message.contains("bad entry") => {
                    assert!(matches!(error, LaunchError::HostfileEntry { .. }), "{case}: {error}");
                }
                _ if message.contains("is empty") => {
                    assert!(matches!(error, LaunchError::HostfileEmpty), "{case}: {error}");
                }
                _ => {}
            }
            return;
        }
        match parsed {
            Ok(pool) => assert_eq!(json!(pool), case["expect"], "{case}"),
            Err(LaunchError::HostfileEntry { reason, .. }) => {
                // OURS 0 and 1: only these reasons may refuse what the recording accepted.
                let ours = ["the slot count is not a number", "larger than 65536", "host name"];
                assert!(ours.iter().any(|known| reason.contains(known)), "{case}: {reason}: {OURS:?}");
            }
            Err(error) => panic!("{case}: {error}"),
        }
    });
}

#[test]
fn golden_resource_filter() {
    golden().each_case("launcher/resource_filter.json", 34, |case| {
        let pool: HostPool = serde_json::from_value(case["pool"].clone()).unwrap();
        let (include, exclude) = (case["include"].as_str().unwrap(), case["exclude"].as_str().unwrap());
        let filtered = filter::apply(&pool, include, exclude);
        if !expects_error(case) {
            let active: Vec<(String, Vec<u32>)> = filtered.unwrap().into_iter().collect();
            assert_eq!(json!(active), case["expect"], "{case}");
            return;
        }
        let message = case["error"]["message"].as_str().unwrap_or_default();
        if message.contains("list.remove") {
            // OURS 2: what is left is the pool without any of the named slots.
            let active = filtered.unwrap_or_else(|error| panic!("{case}: {error}: {OURS:?}"));
            let named = |host: &str, slot: u32| {
                exclude.split('@').any(|node| match node.split_once(':') {
                    Some((name, slots)) => {
                        name == host && slots.split(',').any(|text| text.trim().parse() == Ok(slot))
                    }
                    None => node == host,
                })
            };
            for (host, &slots) in &pool {
                let expected: Vec<u32> = (0..slots).filter(|&slot| !named(host, slot)).collect();
                assert_eq!(active.get(host).cloned().unwrap_or_default(), expected, "{case}");
            }
            return;
        }
        let error = filtered.expect_err(&format!("{case}"));
        let right_kind = match () {
            _ if message.contains("mutually exclusive") => matches!(error, LaunchError::FilterBoth),
            _ if message.contains("not found in hostfile") => {
                matches!(error, LaunchError::FilterUnknownHost { .. })
            }
            _ if message.starts_with("No slot") => matches!(error, LaunchError::FilterUnknownSlot { .. }),
            _ => matches!(error, LaunchError::FilterSyntax { .. } | LaunchError::FilterUnknownHost { .. }),
        };
        assert!(right_kind, "{case}: {error}");
    });
}

#[test]
fn golden_world_info() {
    golden().each_case("launcher/world_info.json", 4, |case| {
        let world: ActiveSlots = serde_json::from_value(case["world_info"].clone()).unwrap();
        assert_eq!(json!(world_info::encode(&world)), case["expect"], "{case}");
        assert_eq!(world_info::decode(case["expect"].as_str().unwrap()).unwrap(), world, "{case}");
    });
}

#[test]
fn golden_core_ranges() {
    golden().each_case("launcher/core_ranges.json", 12, |case| {
        let parsed = cores::parse_core_list(case["value"].as_str().unwrap());
        match expects_error(case) {
            true => assert!(matches!(parsed, Err(LaunchError::CoreList { .. })), "{case}: {parsed:?}"),
            false => assert_eq!(json!(parsed.unwrap()), case["expect"], "{case}"),
        }
    });
}

#[test]
fn golden_numactl() {
    golden().each_case("launcher/numactl.json", 11, |case| {
        let listed = case["bind_core_list"].as_str().map(|list| cores::parse_core_list(list).unwrap());
        let cores = listed.unwrap_or_else(|| (0..case["physical_cores"].as_u64().unwrap() as u32).collect());
        let numa: Vec<Vec<u32>> = serde_json::from_value(case["numa_cores"].clone()).unwrap();
        let number = |name: &str| case[name].as_u64().unwrap() as usize;
        let bound = cores::bind(&cores, &numa, number("num_local_procs"), number("local_rank"));
        match expects_error(case) {
            true => assert!(matches!(bound, Err(LaunchError::TooFewCores { .. })), "{case}: {bound:?}"),
            false => {
                let bound = bound.unwrap();
                let found = json!({"cores_per_rank": bound.cores.len(), "cmd": bound.numactl()});
                assert_eq!(found, case["expect"], "{case}");
            }
        }
    });
}

#[test]
fn golden_num_nodes() {
    golden().each_case("launcher/num_nodes.json", 6, |case| {
        let parsed = node_count::parse(case["value"].as_str().unwrap(), case["elastic"].as_bool().unwrap());
        match expects_error(case) {
            true => assert!(matches!(parsed, Err(LaunchError::NodeCount { .. })), "{case}: {parsed:?}"),
            // OURS 3
            false
                if case["expect"].as_array().is_some_and(|range| {
                    let (min, max) = (range[0].as_i64().unwrap(), range[1].as_i64().unwrap());
                    min < 0 || (max != -1 && max < min)
                }) =>
            {
                assert!(parsed.is_err(), "{case}: {OURS:?}");
            }
            false => {
                let count = parsed.unwrap();
                let found = json!([i64::from(count.min), count.max.map_or(-1, i64::from)]);
                assert_eq!(found, case["expect"], "{case}");
            }
        }
    });
}
