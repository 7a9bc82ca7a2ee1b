//! The mixture of experts against DeepSpeed's recorded gates and layers.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use ferrospeed_nn::moe::capacity::{self, Assignment, Limit};
use ferrospeed_nn::moe::{Capacity, GateDraws, GateNoise, GroupPlan, split_param_groups};
use ferrospeed_nn::{Init, Linear, Mixed, Mlp, Mode, Module, Moe, MoeConfig};
use ferrospeed_tensor::store::{ParamSource, PlainStore};
use ferrospeed_tensor::{Activation, DType, Device, Param, Result, Tensor, TensorError, autograd};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use serde_json::Value;

const TOLERANCE: f32 = 1e-5;

/// All numbers of nested lists.
fn floats(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(values) => values.iter().flat_map(floats).collect(),
        other => vec![other.as_f64().expect("a number") as f32],
    }
}

fn count(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap_or_else(|| panic!("{key} is a count")) as usize
}

fn is(case: &Value, key: &str) -> bool {
    case[key].as_bool().unwrap_or(false)
}

fn optional(case: &Value, key: &str) -> Option<Vec<f32>> {
    case.get(key).filter(|value| !value.is_null()).map(floats)
}

fn draws(case: &Value) -> GateDraws {
    GateDraws {
        jitter: optional(case, "jitter"),
        gumbel: optional(case, "gumbel"),
        priority: optional(case, "rts_uniform"),
    }
}

fn config(case: &Value, width: usize, experts: usize) -> MoeConfig {
    let number = |key: &str| case[key].as_f64().map(|number| number as f32);
    let factor = number("capacity_factor").expect("a factor");
    let capacity = Capacity {
        factor,
        evaluation_factor: number("eval_capacity_factor").unwrap_or(factor),
        min: count(case, "min_capacity"),
        drops: is(case, "drop_tokens"),
        random_selection: case["use_rts"].as_bool().unwrap_or(true),
        samples_second: is(case, "top2_2nd_expert_sampling"),
    };
    let noise = match case["noisy_gate_policy"].as_str() {
        None | Some("None") => None,
        Some("Jitter") => Some(GateNoise::Jitter),
        Some("RSample") => Some(GateNoise::RSample),
        Some(other) => panic!("an unknown policy {other}"),
    };
    MoeConfig { noise, ..MoeConfig::with_capacity(width, experts, count(case, "k"), capacity) }
}

struct Given(BTreeMap<String, Vec<f32>>);

impl ParamSource for Given {
    fn load(&self, param: &Param, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let value = self.0.get(param.name());
        let value = value.ok_or_else(|| TensorError::argument("test", format!("no {}", param.name())))?;
        out.copy_from_slice(&value[range]);
        Ok(())
    }
}

/// A gate by itself: the router is the identity, and expert `e` answers with the `e`-th unit vector, so the output is the
/// weight of each expert.
fn gate_alone(case: &Value, device: &Device) -> Result<Mixed> {
    let (tokens, experts) = (count(case, "tokens"), count(case, "experts"));
    let init = Init::root();
    let moe = Moe::new(&init, config(case, experts, experts), |_, index| {
        let unit = move |x: &Tensor, _: Mode| {
            let rows = x.sizes()[0];
            let ones: Vec<f32> =
                (0..rows * experts).map(|i| if i % experts == index { 1.0 } else { 0.0 }).collect();
            Tensor::from_slice(&ones, [rows, experts], x.device())
        };
        Arc::new(unit) as Arc<dyn Module>
    })?;
    let identity = (0..experts * experts).map(|i| if i % (experts + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let weights = Given([("deepspeed_moe.gate.wg.weight".to_owned(), identity)].into());
    let _store = PlainStore::attach(init.parameters().as_slice(), DType::F32, device, &weights)?;
    let logits = Tensor::from_slice(&floats(&case["logits"]), [tokens, experts], device)?;
    let used: Option<Vec<bool>> =
        optional(case, "used_token").map(|used| used.iter().map(|&used| used != 0.0).collect());
    moe.forward_with(&logits, Mode::Train, used.as_deref(), &draws(case))
}

fn softmax(logits: &[f32], experts: usize) -> Vec<f32> {
    let of_row = |row: &[f32]| {
        let most = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let powers: Vec<f32> = row.iter().map(|value| (value - most).exp()).collect();
        let sum: f32 = powers.iter().sum();
        powers.into_iter().map(|power| power / sum).collect::<Vec<f32>>()
    };
    logits.chunks(experts).flat_map(of_row).collect()
}

fn places(case: &Value, logits: &[f32], experts: usize) -> Assignment {
    let gates = softmax(logits, experts);
    let noisy: Vec<f32> = match optional(case, "gumbel") {
        Some(noise) => logits.iter().zip(noise).map(|(value, noise)| value + noise).collect(),
        None if count(case, "k") == 1 => gates.clone(),
        None => logits.to_vec(),
    };
    let limit = Limit {
        factor: case["capacity_factor"].as_f64().expect("a factor") as f32,
        min: count(case, "min_capacity"),
        drops: is(case, "drop_tokens"),
    };
    if count(case, "k") > 1 {
        return capacity::top_k(&gates, &noisy, experts, count(case, "k"), limit);
    }
    let used: Option<Vec<bool>> =
        optional(case, "used_token").map(|used| used.iter().map(|&used| used != 0.0).collect());
    let priority = optional(case, "rts_uniform");
    capacity::top1(&noisy, experts, used.as_deref(), priority.as_deref(), limit).expect("an answer")
}

#[test]
fn golden_gates() {
    let device = ferrospeed_cpu::device();
    golden().each_case("moe/gating.json", 33, |case| {
        let (tokens, experts) = (count(case, "tokens"), count(case, "experts"));
        let mixed = gate_alone(case, &device);
        if let Some(error) = case["error"].as_str() {
            // DeepSpeed fails where the capacity exceeds the tokens; we keep them all.
            if !error.contains("min_capacity") {
                let mixed = mixed.unwrap();
                assert_eq!(mixed.routing.capacity(), Some(tokens));
                assert_eq!(mixed.routing.statistics().unwrap().dropped_share, 0.0);
                return;
            }
            let message = mixed.unwrap_err().to_string();
            assert!(message.contains("least capacity"), "{message}");
            return;
        }
        let mixed = mixed.unwrap();
        assert_eq!(mixed.routing.capacity(), Some(count(case, "capacity")));
        let counts: Vec<f32> =
            mixed.routing.chosen().to_vec::<i64>().unwrap().into_iter().map(|count| count as f32).collect();
        assert_eq!(counts, floats(&case["exp_counts"]));
        assert_close(
            "l_aux",
            &[mixed.balance_loss().unwrap().item().unwrap()],
            &floats(&case["l_aux"]),
            TOLERANCE,
            TOLERANCE,
        );
        if is(case, "tie_break_implementation_defined") {
            return;
        }
        let assignment = places(case, &floats(&case["logits"]), experts);
        let mut weights = vec![0.0; tokens * experts];
        let mut recorded: Vec<[usize; 3]> = Vec::new();
        for entry in case["combine_sparse"].as_array().expect("a list").iter().map(floats) {
            let [token, expert, place] = [0, 1, 2].map(|i| entry[i] as usize);
            weights[token * experts + expert] += entry[3];
            recorded.push([token, expert, place]);
        }
        assert_close("weights", &mixed.output.to_vec_f32().unwrap(), &weights, TOLERANCE, TOLERANCE);
        let chosen = count(case, "k");
        let mut ours: Vec<[usize; 3]> = assignment
            .places
            .iter()
            .enumerate()
            .filter_map(|(slot, place)| Some([slot / chosen, assignment.experts[slot], (*place)?]))
            .collect();
        ours.sort_unstable();
        recorded.sort_unstable();
        assert_eq!(ours, recorded, "token, expert, place");
    });
}

#[test]
fn golden_capacities() {
    golden().each_case("moe/capacity.json", 280, |case| {
        let factor = case["capacity_factor"].as_f64().expect("a factor") as f32;
        let (tokens, experts) = (count(case, "tokens"), count(case, "experts"));
        let ours = capacity::capacity(tokens, experts, factor, count(case, "min_capacity"));
        assert_eq!(ours, count(case, "capacity"), "{case}");
    });
}

fn perceptron(init: &Init, width: usize, inner: usize) -> Mlp {
    let up = Linear::new(&init.at("w1"), width, inner, true);
    let down = Linear::new(&init.at("w2"), inner, width, true);
    Mlp::new(up, down, Activation::Relu)
}

/// A layer with its weights, ready to run.
struct Layer {
    moe: Moe,
    names: Vec<String>,
    store: Arc<PlainStore>,
}

impl Layer {
    /// `grouped`: experts as perceptrons that are multiplied together, or as layers of any kind.
    fn new(
        case: &Value,
        experts: usize,
        weights: BTreeMap<String, Vec<f32>>,
        grouped: bool,
        device: &Device,
    ) -> Layer {
        let (width, inner) = (count(case, "H"), count(case, "F"));
        let init = Init::root();
        let config = config(case, width, experts);
        let mut moe = match grouped {
            true => Moe::new(&init, config, |init, _| perceptron(init, width, inner)),
            false => {
                Moe::new(&init, config, |init, _| Arc::new(perceptron(init, width, inner)) as Arc<dyn Module>)
            }
        }
        .unwrap();
        if is(case, "use_residual") {
            let mlp = perceptron(&init.at("mlp"), width, inner);
            moe = moe.beside(&init, mlp);
        }
        let parameters = init.parameters();
        let store = PlainStore::attach(parameters.as_slice(), DType::F32, device, &Given(weights)).unwrap();
        Layer { moe, names: parameters.names().into_iter().map(str::to_owned).collect(), store }
    }

    /// Forward and backward; what came out, and the gradient of the input.
    fn run(&self, facts: &Value, mode: Mode, balance_weight: f32, device: &Device) -> (Mixed, Vec<f32>) {
        let rows = facts["x"].as_array().expect("a list");
        let tokens = rows[0].as_array().expect("a list");
        let shape = [rows.len(), tokens.len(), tokens[0].as_array().expect("a list").len()];
        let tensor = |key: &str| Tensor::from_slice(&floats(&facts[key]), shape, device).unwrap();
        let x = tensor("x").tracked();
        let mixed = self.moe.forward_with(&x, mode, None, &draws(facts)).unwrap();
        let of_loss = Tensor::scalar(balance_weight, device).unwrap();
        let balance = mixed.balance_loss().unwrap();
        let of_loss = of_loss.view(*balance.shape()).unwrap();
        let roots = [(mixed.output.clone(), tensor("dy")), (balance, of_loss)];
        autograd::backward_with(&roots).unwrap();
        let dx = x.grad().expect("the input's").to_vec_f32().unwrap();
        (mixed, dx)
    }

    fn gradients(&self) -> BTreeMap<String, Vec<f32>> {
        let taken = self.store.take_gradients();
        let floats =
            |gradient: Option<Tensor>| gradient.expect("every parameter gets one").to_vec_f32().unwrap();
        self.names.iter().cloned().zip(taken.into_iter().map(floats)).collect()
    }
}

fn check_forward(facts: &Value, mixed: &Mixed, dx: &[f32]) {
    let close = |what: &str, ours: &[f32], key: &str| {
        assert_close(what, ours, &floats(&facts[key]), TOLERANCE, TOLERANCE);
    };
    close("y", &mixed.output.to_vec_f32().unwrap(), "y");
    close("l_aux", &[mixed.balance_loss().unwrap().item().unwrap()], "l_aux");
    close("dx", dx, "dx");
    let counts = mixed.routing.statistics().unwrap().tokens_per_expert;
    assert_eq!(counts.iter().map(|&count| count as f32).collect::<Vec<_>>(), floats(&facts["exp_counts"]));
}

#[test]
fn golden_layers() {
    let device = ferrospeed_cpu::device();
    golden().each_case("moe/layer_ep1.json", 9, |case| {
        let object = |key: &str| case[key].as_object().expect("tensors by name");
        let weights = || object("params").iter().map(|(name, value)| (name.clone(), floats(value))).collect();
        let mode = if is(case, "training") { Mode::Train } else { Mode::Evaluate };
        for grouped in [true, false] {
            let layer = Layer::new(case, count(case, "E"), weights(), grouped, &device);
            let recorded = object("params").keys().cloned().collect::<std::collections::BTreeSet<_>>();
            assert_eq!(layer.names.iter().cloned().collect::<std::collections::BTreeSet<_>>(), recorded);
            let weight = case["l_aux_weight"].as_f64().expect("a weight") as f32;
            let (mixed, dx) = layer.run(case, mode, weight, &device);
            check_forward(case, &mixed, &dx);
            let ours = layer.gradients();
            for (name, gradient) in object("grads") {
                assert_close(name, &ours[name], &floats(gradient), TOLERANCE, TOLERANCE);
            }
        }
    });
}

/// A rank's numbers with the settings of its case.
fn draws_of(case: &Value, rank: &Value) -> Value {
    let mut both = case.as_object().expect("an object").clone();
    both.extend(rank.as_object().expect("an object").clone());
    Value::Object(both)
}

/// What enters the `local` experts from `first` on: `[peers, local, capacity, width]`, zero where a place is free.
fn expert_input(
    case: &Value,
    peers: &Range<usize>,
    sent: &[Assignment],
    first: usize,
    local: usize,
) -> Vec<f32> {
    let (width, chosen) = (count(case, "H"), count(case, "k"));
    // Without dropping, peers agree on the fullest expert's.
    let capacity = peers.clone().map(|peer| sent[peer].capacity).max().expect("a peer");
    let mut input = vec![0.0; peers.len() * local * capacity * width];
    for (source, peer) in peers.clone().enumerate() {
        let x = floats(&case["ranks"][peer]["x"]);
        for (slot, place) in sent[peer].places.iter().enumerate() {
            let expert = sent[peer].experts[slot];
            if let Some(place) = place
                && (first..first + local).contains(&expert)
            {
                let row = (source * local + expert - first) * capacity + place;
                let token = slot / chosen;
                input[row * width..][..width].copy_from_slice(&x[token * width..][..width]);
            }
        }
    }
    input
}

#[test]
fn golden_layers_whose_experts_are_spread_over_ranks() {
    // The recordings' loss is `sum(y·dy) + 0.1·l_aux`.
    const BALANCE_WEIGHT: f32 = 0.1;
    const PARTS: [&str; 4] = ["w1.weight", "w1.bias", "w2.weight", "w2.bias"];
    let device = ferrospeed_cpu::device();
    golden().each_case("moe/layer_ep.json", 5, |case| {
        let (experts, together) = (count(case, "num_experts"), count(case, "ep_size"));
        let name =
            |expert: usize, part: &str| format!("deepspeed_moe.experts.deepspeed_experts.{expert}.{part}");
        let weights = || {
            let of_expert = |(expert, values): (usize, &Value)| {
                let values = values.as_array().expect("four tensors").clone();
                PARTS.into_iter().zip(values).map(move |(part, value)| (name(expert, part), floats(&value)))
            };
            let gate = ("deepspeed_moe.gate.wg.weight".to_owned(), floats(&case["gate"]));
            let experts = case["experts"].as_array().expect("a list").iter().enumerate();
            std::iter::once(gate).chain(experts.flat_map(of_expert)).collect()
        };
        // Each rank computes all experts for its own tokens; what an owner would get of its peers is their sum.
        let ranks = case["ranks"].as_array().expect("a list");
        let mut sent: Vec<Assignment> = Vec::new();
        let layer = Layer::new(case, experts, weights(), true, &device);
        let of_ranks: Vec<BTreeMap<String, Vec<f32>>> = ranks
            .iter()
            .map(|rank| {
                let (mixed, dx) = layer.run(rank, Mode::Train, BALANCE_WEIGHT, &device);
                check_forward(rank, &mixed, &dx);
                sent.push(places(&draws_of(case, rank), &mixed.logits.to_vec_f32().unwrap(), experts));
                let gradients = layer.gradients();
                let dgate = &gradients["deepspeed_moe.gate.wg.weight"];
                assert_close("dgate", dgate, &floats(&rank["dgate"]), TOLERANCE, TOLERANCE);
                gradients
            })
            .collect();
        for (index, rank) in ranks.iter().enumerate() {
            let peers = index / together * together..(index / together + 1) * together;
            let local = rank["local_expert_ids"].as_array().expect("a list");
            let ours = expert_input(case, &peers, &sent, local.len() * (index % together), local.len());
            assert_eq!(ours, floats(&rank["expert_input"]), "rows that enter the experts of rank {index}");
            for (expert, recorded) in local.iter().zip(rank["dexperts"].as_array().expect("a list")) {
                let expert = expert.as_u64().expect("a number") as usize;
                for (part, recorded) in PARTS.into_iter().zip(recorded.as_array().expect("four tensors")) {
                    let name = name(expert, part);
                    let mut sum = vec![0.0; of_ranks[0][&name].len()];
                    for peer in peers.clone() {
                        sum.iter_mut().zip(&of_ranks[peer][&name]).for_each(|(sum, value)| *sum += value);
                    }
                    assert_close(&name, &sum, &floats(recorded), TOLERANCE, TOLERANCE);
                }
            }
        }
    });
}

#[test]
fn golden_param_groups() {
    golden().each_case("moe/param_groups.json", 4, |case| {
        let given = case["input"].as_array().expect("a list");
        let plans: Vec<GroupPlan<'_>> = given
            .iter()
            .map(|group| GroupPlan {
                name: group["name"].as_str().expect("a name"),
                params: group["params"]
                    .as_array()
                    .expect("a list")
                    .iter()
                    .map(|param| (count(param, "numel"), param["expert_group"].as_str()))
                    .collect(),
            })
            .collect();
        let most = case["max_group_size"].as_u64().map(|most| most as usize);
        let ours: Vec<Value> = split_param_groups(&plans, most)
            .into_iter()
            .map(|group| {
                let params: Vec<String> =
                    group.params.iter().map(|index| format!("{}.{index}", group.origin)).collect();
                let mut told = serde_json::json!({"name": group.name, "moe": group.is_moe, "params": params});
                let settings = given[group.origin]["extra"].as_object().expect("settings").clone();
                told.as_object_mut().expect("an object").extend(settings);
                told
            })
            .collect();
        // DeepSpeed begins with an empty group where the first expert parameter alone exceeds the limit.
        let recorded: Vec<Value> = case["output_sorted_moe_tail"].as_array().expect("a list").clone();
        let is_left =
            |group: &&Value| !(is(group, "moe") && group["params"].as_array().is_some_and(Vec::is_empty));
        // The order of the expert groups follows a set's in DeepSpeed, which is none.
        let sorted = |groups: Vec<&Value>| {
            let mut told: Vec<String> = groups.into_iter().map(Value::to_string).collect();
            told[given.len()..].sort_unstable();
            told
        };
        assert_eq!(sorted(ours.iter().collect()), sorted(recorded.iter().filter(is_left).collect()));
    });
}
