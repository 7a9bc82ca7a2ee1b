//! What a step does in each mode, and where its tiles are: as text, which is what `ferrospeed plan --placement` prints.

use ferrospeed_config::{AutoValues, Config, DataType};
use ferrospeed_placement::buckets::Kind;
use ferrospeed_placement::{
    DeviceKind, GroupFacts, ParamFacts, Placement, Ranks, Request, Spread, Tie, UpdateRule, place,
};
use serde_json::{Value, json};

/// What a test changes of the usual request: four weights and a bias in bf16, Adam, two ranks of one host.
struct Asked {
    zero: Value,
    device: DeviceKind,
    ranks: usize,
    accumulates: bool,
    rule: UpdateRule,
    tie: Option<Tie>,
}

impl Asked {
    fn of(zero: Value) -> Asked {
        let (device, rule) = (DeviceKind::Host, UpdateRule::EachElement);
        Asked { zero, device, ranks: 2, accumulates: false, rule, tie: None }
    }

    fn on_gpu(zero: Value) -> Asked {
        Asked { device: DeviceKind::Beside, ..Asked::of(zero) }
    }

    fn placed(&self) -> Placement {
        let json = json!({"train_micro_batch_size_per_gpu": 1, "zero_optimization": self.zero});
        let config = Config::from_value("test", &json).unwrap();
        let ranks = std::num::NonZeroU64::new(self.ranks as u64).unwrap();
        let config = config.resolve(ranks, &AutoValues::new()).unwrap().0;
        let facts = |(place, (numel, dims)): (usize, (usize, usize))| ParamFacts {
            numel,
            dims,
            group: Some((0, place)),
            spread: 0,
            kind: Kind::Ordinary,
        };
        let shapes = [(6000, 2), (4000, 2), (101, 1)];
        let params: Vec<ParamFacts> = shapes.into_iter().enumerate().map(facts).collect();
        let spread = Spread { tie: self.tie.clone(), ..Spread::over(Ranks::first_of(self.ranks, true)) };
        place(&Request {
            zero: &config.zero,
            params: &params,
            groups: &[GroupFacts {
                states: if self.rule == UpdateRule::EachMatrix { 1 } else { 2 },
                rule: self.rule,
            }],
            spreads: &[spread],
            world: self.ranks,
            device: self.device,
            values: DataType::Bf16,
            wire: DataType::Bf16,
            kept: if self.accumulates { DataType::Fp32 } else { DataType::Bf16 },
            accumulates: self.accumulates,
            reduces_each_micro_batch: false,
            scales: &[false],
            parts_differ: false,
        })
    }
}

/// Every mode, by name.
fn modes() -> Vec<(&'static str, Asked)> {
    let locked = || json!({"device": "cpu", "pin_memory": true});
    let disk = || json!({"device": "nvme", "nvme_path": "/disk"});
    let host_of = |stage: u8| Asked::of(json!({"stage": stage}));
    let summed = |stage: u8| Asked { accumulates: true, ..host_of(stage) };
    let rule = |stage: u8, rule| Asked { rule, ..host_of(stage) };
    let tie = Tie { stages: Ranks::first_of(2, true), peers: Ranks::alone() };
    let half = json!({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}});
    let both = json!({"stage": 3, "offload_optimizer": locked(), "offload_param": locked()});
    let mut values_on_disk = disk();
    values_on_disk["max_in_cpu"] = 3000.into();
    let on_disk = json!({"stage": 3, "offload_optimizer": disk(), "offload_param": values_on_disk});
    vec![
        ("stage 0", host_of(0)),
        ("stage 1", host_of(1)),
        ("stage 2", host_of(2)),
        ("stage 3", host_of(3)),
        ("stage 0, micro-batches added up", summed(0)),
        ("stage 1, micro-batches added up", summed(1)),
        ("stage 2, micro-batches added up", summed(2)),
        ("stage 3, micro-batches added up", summed(3)),
        ("stage 1, beside backward", Asked::of(json!({"stage": 1, "overlap_comm": true}))),
        ("one GPU", Asked { ranks: 1, ..Asked::on_gpu(json!({"stage": 0})) }),
        ("GPUs, stage 2", Asked::on_gpu(json!({"stage": 2}))),
        (
            "GPUs, stage 2, states with the host",
            Asked::on_gpu(json!({"stage": 2, "offload_optimizer": locked()})),
        ),
        ("GPUs, stage 3, half of the states with the host", Asked::on_gpu(half)),
        ("GPUs, stage 3, all with the host", Asked::on_gpu(both)),
        ("GPUs, stage 3, all on a disk", Asked::on_gpu(on_disk.clone())),
        ("stage 3, all on a disk", Asked::of(on_disk)),
        ("LAMB, stage 1", rule(1, UpdateRule::EachTensor)),
        ("Muon, stage 1", rule(1, UpdateRule::EachMatrix)),
        ("1-bit Adam", rule(0, UpdateRule::Momentum)),
        ("a weight of two stages, stage 0", Asked { tie: Some(tie), ..host_of(0) }),
    ]
}

#[test]
fn every_mode_is_placed_as_recorded() {
    let printed =
        modes().iter().map(|(name, asked)| format!("== {name}\n{}\n", asked.placed())).collect::<String>();
    let recorded = include_str!("../golden/programs.txt");
    let differing = printed.lines().zip(recorded.lines()).find(|(printed, recorded)| printed != recorded);
    assert!(
        printed == recorded,
        "the first other line is {differing:?}; if that is meant, tests/golden/programs.txt is to be:\n{printed}"
    );
}
