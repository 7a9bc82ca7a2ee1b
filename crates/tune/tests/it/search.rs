//! Which layout is fastest, by the model of costs alone and with a few simulated runs.

use std::convert::Infallible;
use std::num::NonZeroU64;

use ferrospeed_config::{AutoValues, Config};
use ferrospeed_testkit::property::Random;
use ferrospeed_tune::cost::{Limit, Rates, Reason};
use ferrospeed_tune::layout::{Layout, Offload, Open, Space};
use ferrospeed_tune::model::{Transformer, from_hugging_face};
use ferrospeed_tune::plan::{Capacity, Operands, Processor, Tier};
use ferrospeed_tune::search::{Answer, Found, Question, search};
use ferrospeed_tune::tuning::machine::Parts;
use ferrospeed_tune::tuning::planned::{self, Candidate, Outcome};
use serde_json::{Value, json};

const GIB: u64 = 1 << 30;

fn resolve(config: &Value, ranks: u64) -> Option<Config> {
    let read = Config::from_value("test", config).ok()?;
    Some(read.resolve(NonZeroU64::new(ranks)?, &AutoValues::new()).ok()?.0)
}

/// The shape of the quickstart's model.
fn quickstart() -> Transformer {
    let config = json!({"model_type": "gpt2", "vocab_size": 257, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 256});
    from_hugging_face(&config).unwrap()
}

fn seven_billions() -> Transformer {
    let config = json!({
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
        "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096,
    });
    from_hugging_face(&config).unwrap()
}

/// What is left open, where nothing but an optimizer is said.
fn open() -> Value {
    json!({"bf16": {"enabled": true}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
}

fn gpus() -> Rates {
    Rates {
        flops_per_s: 4e14,
        memory_bytes_per_s: 2e12,
        wire_bytes_per_s: 2e11,
        link_bytes_per_s: Some(2e10),
        ranks_per_host: 8,
        host_bytes_per_s: 2e10,
        disk_bytes_per_s: 1e9,
        half_speed_tokens: 2048.0,
    }
}

struct Case {
    model: Transformer,
    config: Value,
    ranks: u64,
    length: u64,
    processor: Processor,
    capacity: Capacity,
    rates: Rates,
}

impl Case {
    fn on_gpus(config: Value, ranks: u64, device_gib: u64, host_gib: u64) -> Case {
        let capacity = Capacity {
            device_bytes: Some(device_gib * GIB),
            host_bytes: host_gib * GIB,
            nvme_bytes: 0,
            ranks_per_host: 8,
        };
        let (model, length, processor) = (seven_billions(), 4096, Processor::Gpu);
        Case { model, config, ranks, length, processor, capacity, rates: gpus() }
    }

    fn quickstart(config: Value, ranks: u64) -> Case {
        let capacity =
            Capacity { device_bytes: None, host_bytes: 16 * GIB, nvme_bytes: 0, ranks_per_host: ranks };
        let rates = Rates {
            flops_per_s: 5e10,
            memory_bytes_per_s: 5e9,
            wire_bytes_per_s: 2e9,
            link_bytes_per_s: None,
            ranks_per_host: ranks,
            host_bytes_per_s: 1e10,
            disk_bytes_per_s: 1e9,
            half_speed_tokens: 200.0,
        };
        let (model, processor) = (quickstart(), Processor::Cpu);
        Case { model, config, ranks, length: 256, processor, capacity, rates }
    }

    fn space(&self) -> Space {
        Space::left_open_by(&Open {
            ds_config: &self.config,
            model: &self.model,
            ranks: self.ranks,
            sequence_length: self.length,
            processor: self.processor,
            recomputes: false,
            is_divided: false,
        })
    }

    fn answer(&self) -> Answer {
        let question = Question {
            model: &self.model,
            expert_ranks: 1,
            ds_config: &self.config,
            ranks: self.ranks,
            sequence_length: self.length,
            processor: self.processor,
            operands: Operands::InPlace,
            capacity: self.capacity,
            rates: self.rates,
        };
        search(&question, &self.space(), resolve)
    }
}

#[test]
fn the_fastest_layout_that_fits_comes_first_and_each_says_what_it_sends() {
    let mut config = open();
    config["train_batch_size"] = 64.into();
    let answer = Case::on_gpus(config, 8, 80, 900).answer();
    let [best, others @ ..] = &answer.fitting[..] else { panic!("nothing fits: {answer:?}") };
    assert!(
        others.iter().all(|other| other.samples_per_s <= best.samples_per_s && other.shortfalls.is_empty())
    );
    assert!(best.plan.total(Tier::Device) <= 80 * GIB, "{}", best.plan);
    assert!(answer.fitting.iter().all(|found| found.samples == 64), "the batch of a step stays");
    let sent = |tensor: u64, sequence: u64| -> Vec<Reason> {
        let is_it = |found: &&Found| (found.layout.tensor, found.layout.sequence) == (tensor, sequence);
        let found = answer.fitting.iter().find(is_it).unwrap_or_else(|| panic!("no tp{tensor}_sp{sequence}"));
        found.work.sent.iter().map(|sent| sent.reason).collect()
    };
    assert_eq!(sent(8, 1), [Reason::Slices]);
    assert!(sent(1, 8).contains(&Reason::Sequences) && sent(2, 2).contains(&Reason::Gradients));
}

#[test]
fn what_cannot_fit_is_refused_and_the_nearest_says_what_is_missing() {
    let answer = Case::on_gpus(open(), 2, 8, 8).answer();
    assert!(answer.fitting.is_empty(), "{:?}", answer.fitting.first().map(|found| found.layout));
    let nearest = answer.nearest.expect("something lacks least");
    let short = nearest.shortfalls[0];
    assert!(short.needed_bytes > short.available_bytes, "{short:?}");
    // With room in the host's memory, state waits there.
    let answer = Case::on_gpus(open(), 2, 16, 900).answer();
    let best = answer.fitting.first().expect("offloaded state fits");
    assert_ne!(best.layout.offload, Offload::AsConfigured, "{}", best.layout);
    assert!(best.plan.total(Tier::Host) > 0 && best.time.offload_s > 0.0, "{}", best.plan);
}

#[test]
fn a_slow_wire_moves_the_choice_to_what_sends_least() {
    let mut config = open();
    config["train_batch_size"] = 256.into();
    let mut case = Case::on_gpus(config, 8, 140, 2000);
    let fast = case.answer().fitting.remove(0);
    case.rates.wire_bytes_per_s = 1e8;
    let slow = case.answer().fitting.remove(0);
    assert!(slow.work.sent_bytes() < 1.01 * fast.work.sent_bytes(), "{} after {}", slow.layout, fast.layout);
    assert_eq!((slow.layout.tensor, slow.layout.sequence), (1, 1), "{}", slow.layout);
    assert_eq!(slow.time.binding(), Limit::Wire, "{:?}", slow.time);
    // Slices on two hosts send over the link between them.
    let spans = |found: &Found| found.work.sent.iter().map(|sent| sent.span).max().unwrap_or(0);
    assert_eq!(spans(&slow), 8);
}

#[test]
fn what_is_written_stays_and_lists_are_choices() {
    let mut config = open();
    config["zero_optimization"] = json!({"stage": [1, 3]});
    config["train_micro_batch_size_per_gpu"] = json!([2, 4]);
    config["tensor_parallel"] = json!({"autotp_size": 2});
    let space = Case::quickstart(config, 4).space();
    assert_eq!((&space.stages, &space.meshes), (&vec![1, 3], &vec![(2, 1), (2, 2)]));
    assert_eq!(space.layouts(4).len(), 2 * 2 * 2 * 2);
    // Four heads are not cut into eight slices.
    let meshes = Case::quickstart(open(), 8).space().meshes;
    assert!(meshes.contains(&(4, 2)) && meshes.contains(&(1, 8)) && !meshes.iter().any(|mesh| mesh.0 == 8));
    let layout = Layout {
        stage: 3,
        micro_batch: 2,
        accumulation: 4,
        recompute: true,
        tensor: 2,
        sequence: 2,
        offload: Offload::Everything,
    };
    assert_eq!(layout.to_string(), "z3_gas4_tmbspg2_tp2_sp2_oa_ac");
    let written = layout.applied_to(&json!({"train_batch_size": 9, "autotuning": {"enabled": true}}));
    assert_eq!(
        written,
        json!({
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
            "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": true},
                "offload_param": {"device": "cpu", "pin_memory": true}},
            "tensor_parallel": {"autotp_size": 2}, "sequence_parallel_size": 2,
        })
    );
}

/// A machine that is not as the model takes it to be, in ways drawn from a seed: every rate is off by a factor of up to four,
/// exchanges have a price that the model does not know, kernels like some layouts better than others, and a rank needs more
/// or less memory than planned.
struct Machine {
    rates: Rates,
    exchange_s: f64,
    /// How much better or worse each layout runs than its rates say, at most.
    taste: f64,
    seed: u64,
    memory_factor: f64,
    room_bytes: f64,
}

impl Machine {
    fn drawn(seed: u64, expected: &Rates, layouts: &[Found]) -> Machine {
        let mut random = Random(seed);
        // Evenly by powers, from 1/most to most.
        let mut factor = |most: f64| most.powf(random.below(2001) as f64 / 1000.0 - 1.0);
        let rates = Rates {
            flops_per_s: expected.flops_per_s * factor(4.0),
            memory_bytes_per_s: expected.memory_bytes_per_s * factor(4.0),
            wire_bytes_per_s: expected.wire_bytes_per_s * factor(4.0),
            host_bytes_per_s: expected.host_bytes_per_s * factor(4.0),
            half_speed_tokens: expected.half_speed_tokens * factor(8.0),
            ..*expected
        };
        // From 20 µs to 2 ms.
        let exchange_s = 2e-4 * factor(10.0);
        let taste = 0.05 * factor(2.0);
        let memory_factor = 1.06 * factor(1.18);
        let needs = layouts.iter().map(|found| memory_factor * found.plan.total(Tier::Device) as f64);
        let (least, most) =
            needs.fold((f64::INFINITY, 0f64), |(least, most), need| (least.min(need), most.max(need)));
        let room_bytes = 1.5 * least * (most / least).powf(random.below(1001) as f64 / 1000.0);
        Machine { rates, exchange_s, taste, seed, memory_factor, room_bytes }
    }

    /// What the plan says would fit.
    fn is_planned_to_fit(&self, found: &Found) -> bool {
        found.plan.total(Tier::Device) as f64 <= self.room_bytes
    }

    /// Samples in a second; none where memory does not do.
    fn samples_per_s(&self, found: &Found) -> Option<f64> {
        if self.memory_factor * found.plan.total(Tier::Device) as f64 > self.room_bytes {
            return None;
        }
        let Layout { stage, micro_batch, accumulation, recompute, tensor, sequence, .. } = found.layout;
        let exchanges = match stage {
            0 | 1 => 2 * found.work.sent.len() as u64,
            2 => 1 + accumulation,
            _ => 12 * accumulation,
        } + accumulation * 18 * (tensor.min(2) - 1 + sequence.min(2) - 1);
        let name = [u64::from(stage), micro_batch, accumulation, u64::from(recompute), tensor, sequence];
        let seed = name.iter().fold(self.seed, |seed, word| Random(seed ^ word).next());
        let taste = 1.0 + self.taste * (Random(seed).below(2001) as f64 / 1000.0 - 1.0);
        let seconds = found.work.time(&self.rates).total_s() + exchanges as f64 * self.exchange_s;
        Some(taste * found.samples as f64 / seconds)
    }
}

/// How near ten runs come to trying every layout that the plan believes to fit, and to the best of all that the machine runs.
fn reached_in_ten_runs(machine: &Machine, layouts: &[Found]) -> Option<[f64; 2]> {
    let most = layouts.iter().filter_map(|found| machine.samples_per_s(found)).max_by(f64::total_cmp)?;
    let believed: Vec<&Found> = layouts.iter().filter(|found| machine.is_planned_to_fit(found)).collect();
    let candidates: Vec<Candidate> = believed.iter().map(|found| found.candidate()).collect();
    let Ok(tried) = planned::search(&candidates, 10, |layout| {
        let found = believed.iter().find(|found| found.layout == *layout).unwrap();
        Ok::<_, Infallible>(machine.samples_per_s(found).map_or(Outcome::OutOfMemory, Outcome::Measured))
    });
    assert!(tried.len() <= 10);
    let reached = tried.iter().filter_map(|tried| tried.outcome.value()).fold(0.0, f64::max);
    let tried_all =
        believed.iter().filter_map(|found| machine.samples_per_s(found)).max_by(f64::total_cmp)?;
    Some([reached / tried_all, reached / most])
}

#[test]
fn ten_runs_come_within_a_twentieth_of_trying_everything_though_the_model_is_wrong() {
    let mut cases = Vec::new();
    for ranks in [2, 4] {
        for batch in [None, Some(48)] {
            let mut config = open();
            if let Some(batch) = batch {
                config["train_batch_size"] = batch.into();
            }
            cases.push((format!("quickstart, {ranks} ranks, {batch:?}"), Case::quickstart(config, ranks)));
        }
    }
    cases.push(("seven billions, 8 GPUs".to_owned(), Case::on_gpus(open(), 8, 140, 2000)));
    let mut failures = Vec::new();
    for (name, case) in cases {
        let layouts = case.answer().fitting;
        let machines = (0..200).map(|seed| Machine::drawn(seed, &case.rates, &layouts));
        let reached: Vec<[f64; 2]> =
            machines.filter_map(|machine| reached_in_ten_runs(&machine, &layouts)).collect();
        let near = |which: usize| reached.iter().filter(|shares| shares[which] >= 0.95).count();
        let worst = |which: usize| reached.iter().map(|shares| shares[which]).fold(1.0, f64::min);
        let told = format!(
            "{name}: {} layouts, {} machines; within 5 % of trying all that are planned to fit {}, worst {:.3}; of all that run {}, worst {:.3}",
            layouts.len(),
            reached.len(),
            near(0),
            worst(0),
            near(1),
            worst(1)
        );
        println!("{told}");
        if reached.len() < 150 || near(0) * 100 < reached.len() * 97 || worst(0) < 0.87 {
            failures.push(told);
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

/// Layouts of one mesh, and what they need: less in higher stages, with recomputation, and by size.
fn grid(expected: impl Fn(&Layout) -> f64) -> Vec<Candidate> {
    let config = json!({"train_micro_batch_size_per_gpu": [1, 2, 4, 8, 16, 32, 64, 128]});
    let space = Space { meshes: vec![(1, 1)], ..Case::quickstart(config, 2).space() };
    let bytes = |layout: &Layout| {
        layout.micro_batch * (8 - u64::from(layout.stage)) * if layout.recompute { 1 } else { 2 }
    };
    let candidate = |layout: Layout| {
        let parts = Parts { compute_s: 1.0 / expected(&layout), ..Parts::default() };
        Candidate { layout, expected: expected(&layout), bytes: [bytes(&layout), 0], parts, samples: 1.0 }
    };
    space.layouts(2).into_iter().map(candidate).collect()
}

#[test]
fn nothing_is_tried_twice_and_what_failed_by_memory_rules_out_what_needs_more() {
    let candidates = grid(|layout| layout.micro_batch as f64);
    let mut ran = Vec::new();
    let Ok(tried) = planned::search(&candidates, 100, |candidate| {
        ran.push(*candidate);
        Ok::<_, Infallible>(Outcome::OutOfMemory)
    });
    assert!(!tried.is_empty() && tried.iter().all(|tried| tried.outcome.value().is_none()));
    let bytes = |layout: &Layout| candidates.iter().find(|known| known.layout == *layout).unwrap().bytes[0];
    assert!(ran.windows(2).all(|two| bytes(&two[1]) < bytes(&two[0])), "{ran:?}");
}

#[test]
fn a_failure_that_is_not_of_memory_says_nothing_about_other_stages() {
    let candidates = grid(|_| 1.0);
    let Ok(tried) = planned::search(&candidates, 100, |candidate| {
        Ok::<_, Infallible>(if candidate.stage == 3 { Outcome::Failed } else { Outcome::Measured(1.0) })
    });
    let stages: std::collections::BTreeSet<u8> = tried.iter().map(|tried| tried.candidate.stage).collect();
    assert_eq!(stages.into_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
    // Other sizes of a stage that fails are not tried.
    assert_eq!(tried.iter().filter(|tried| tried.candidate.stage == 3).count(), 1);
}
