//! Two groups of parameters with rates of their own, an optimizer of one's own, and a schedule that remembers.
//!
//! cargo run --example two_groups -p ferrospeed --features examples

use ferrospeed::nn::{Init, Linear, Parameters};
use ferrospeed::optimizers::{GroupOptions, Optimizer, OwnOptimizer, ParamGroup, Slices};
use ferrospeed::schedules::{OwnSchedule, Rates, Scheduler};
use ferrospeed::{
    DType, Engine, Failure, LoadOptions, Options, SaveOptions, Setup, Tensor, World, init_distributed,
    initialize_model, ops,
};
use serde_json::{Value, json};

const CONFIG: &str = r#"{
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": { "stage": 1 },
    "zero_allow_untested_optimizer": true
}"#;

/// Momentum, and a step along its sign.
#[derive(Debug)]
struct SignOfMomentum;

impl OwnOptimizer for SignOfMomentum {
    fn name(&self) -> &'static str {
        "sign-of-momentum"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["momentum"]
    }

    fn update(&self, slices: Slices<'_, '_>, options: &GroupOptions, _step: u64) {
        let [momentum] = slices.states else { return };
        let values = slices.weights.iter_mut().zip(slices.gradient).zip(momentum.iter_mut());
        for ((weight, gradient), momentum) in values {
            *momentum = 0.9 * *momentum + 0.1 * gradient;
            *weight -= options.lr as f32 * momentum.signum();
        }
    }
}

/// Halves the rates whenever the loss has not fallen for three steps.
struct HalvingWhenStuck {
    best: f64,
    stuck: u64,
    halvings: i32,
}

impl OwnSchedule for HalvingWhenStuck {
    fn step(&mut self) {}

    fn wants_metric(&self) -> bool {
        true
    }

    fn observe(&mut self, loss: f64) {
        self.stuck = if loss < self.best { 0 } else { self.stuck + 1 };
        self.best = self.best.min(loss);
        if self.stuck == 3 {
            (self.stuck, self.halvings) = (0, self.halvings + 1);
        }
    }

    fn rates(&self, _group: usize, base: &GroupOptions) -> Rates {
        Rates::lr(base.lr * 0.5f64.powi(self.halvings))
    }

    fn state(&self) -> Value {
        json!({ "best": self.best, "stuck": self.stuck, "halvings": self.halvings })
    }

    fn load(&mut self, state: &Value) -> Result<(), String> {
        let number = |key: &str| state[key].as_f64().ok_or(format!("it says no {key}"));
        (self.best, self.stuck) = (number("best")?, number("stuck")? as u64);
        self.halvings = number("halvings")? as i32;
        Ok(())
    }
}

struct Model {
    body: Linear,
    head: Linear,
}

/// An engine whose head learns five times as fast as its body.
fn engine(world: World) -> Result<(Engine, Model), Failure> {
    let init = Init::root();
    let (body, head) =
        (Linear::new(&init.at("body"), 4, 16, true), Linear::new(&init.at("head"), 16, 1, true));
    let parameters = init.parameters();
    let (of_head, of_body) = parameters.partition(|param| param.name().starts_with("head."));
    let rate = |lr| GroupOptions { lr, weight_decay: 0.0, betas: [0.0; 2] };
    let group = |parameters: &Parameters, lr| ParamGroup {
        params: parameters.as_slice().to_vec(),
        options: rate(lr),
    };
    let schedule = HalvingWhenStuck { best: f64::MAX, stuck: 0, halvings: 0 };
    let options = Options {
        groups: Some(vec![group(&of_body, 0.01), group(&of_head, 0.05)]),
        optimizer: Some((Optimizer::own(SignOfMomentum), rate(0.01))),
        scheduler: Some(Scheduler::object(schedule, &[rate(0.01), rate(0.05)])),
        ..Options::default()
    };
    let setup = Setup::from_config(CONFIG, world, ferrospeed::cpu::device())?;
    Ok((initialize_model(&setup, &parameters, options)?, Model { body, head }))
}

fn train(engine: &mut Engine, model: &Model, steps: u64) -> Result<f32, Failure> {
    let (x, y) = (
        Tensor::full([8, 4], 0.5, DType::F32, engine.device())?,
        Tensor::full([8, 1], 0.75, DType::F32, engine.device())?,
    );
    let (until, mut last) = (engine.global_steps() + steps, f32::NAN);
    while engine.global_steps() < until {
        let loss = engine.forward(|_| {
            let guess = model.head.forward(&ops::tanh(&model.body.forward(&x)?)?)?;
            ops::mean(&ops::square(&ops::sub(&guess, &y)?)?)
        })?;
        engine.backward(&loss)?;
        engine.step()?;
        last = loss.item()?;
    }
    Ok(last)
}

fn run(world: World) -> Result<(), Failure> {
    let (mut first, model) = engine(world.clone())?;
    let rates = first.get_lr();
    train(&mut first, &model, 60)?;
    let halved = first.get_lr();
    println!("rates went from {rates:?} to {halved:?}");
    if rates != [0.01, 0.05] || halved[0] >= 0.01 || (halved[1] / halved[0] - 5.0).abs() > 1e-9 {
        return Err(format!("each group should have its own rate, halved: {halved:?}").into());
    }
    // A checkpoint keeps what the schedule remembers, and the optimizer's own state.
    let folder = std::env::temp_dir().join(format!("ferrospeed-two-groups-{}", std::process::id()));
    let outcome = (|| {
        first.save_checkpoint(&folder, &SaveOptions::default())?;
        let (mut second, again) = engine(world)?;
        second.load_checkpoint(&folder, &LoadOptions::default())?;
        let losses = [train(&mut first, &model, 10)?, train(&mut second, &again, 10)?];
        let same = losses[0].to_bits() == losses[1].to_bits() && first.get_lr() == second.get_lr();
        if same { Ok(()) } else { Err(format!("a resumed run should go on alike: {losses:?}").into()) }
    })();
    std::fs::remove_dir_all(&folder)?;
    outcome
}

fn main() -> Result<(), Failure> {
    run(init_distributed()?)
}

#[test]
fn groups_have_rates_of_their_own_and_a_schedule_goes_on_where_it_was() -> Result<(), Failure> {
    main()
}
