"""Records trajectories of torch's optimizers and rates of torch's schedules.

Made with torch 2.13.0: `python scripts/peers/torch_optimizers.py crates/optim/tests/golden-torch`.
"""
import json, pathlib, sys, warnings
import torch

folder = pathlib.Path(sys.argv[1])
torch.manual_seed(7)
warnings.simplefilter("ignore")
INITIAL = [round(x, 4) for x in torch.randn(6).tolist()]
# The last weight's gradient changes its sign, one is zero, one large.
GRADIENTS = [[round(x, 4) for x in (torch.randn(6) * torch.tensor([1, 0.1, 10, 1, 0, (-1.0) ** i])).tolist()] for i in range(12)]

COMMON = [{}, {"weight_decay": 0.1}, {"maximize": True}, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}]
CASES = {
    "Adam": [{"amsgrad": True}, {"amsgrad": True, "weight_decay": 0.1, "maximize": True}, {"maximize": True}, {"betas": [0.8, 0.9], "amsgrad": True, "eps": 1e-3}],
    "AdamW": [{"amsgrad": True, "weight_decay": 0.1}, {"maximize": True, "weight_decay": 0.1}, {"weight_decay": 0.1}],
    "SGD": COMMON + [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.3, "maximize": True}, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1, "maximize": True}],
    "Adagrad": COMMON + [{"lr_decay": 0.1}, {"initial_accumulator_value": 0.5, "eps": 1e-3}, {"lr_decay": 0.05, "initial_accumulator_value": 0.1, "weight_decay": 0.1, "maximize": True}],
    "RMSprop": COMMON + [{"alpha": 0.9, "eps": 1e-3}, {"momentum": 0.9}, {"centered": True}, {"centered": True, "momentum": 0.5, "weight_decay": 0.1}],
    "Adadelta": COMMON + [{"rho": 0.5, "eps": 1e-3}],
    "Adamax": COMMON + [{"betas": [0.5, 0.9], "eps": 1e-3}],
    "NAdam": COMMON + [{"betas": [0.5, 0.9], "eps": 1e-3}, {"momentum_decay": 0.1}, {"decoupled_weight_decay": True, "weight_decay": 0.1}],
    "RAdam": COMMON + [{"betas": [0.5, 0.9], "eps": 1e-3}, {"decoupled_weight_decay": True, "weight_decay": 0.1}, {"betas": [0.9, 0.7]}],
    "ASGD": COMMON + [{"lambd": 0.1, "alpha": 0.5}, {"t0": 3.0}, {"t0": 2, "lambd": 0.01, "weight_decay": 0.1}],
    "Rprop": [{}, {"maximize": True}, {"lr": 0.5, "etas": [0.3, 2.0], "step_sizes": [0.01, 1.0]}],
}
cases = []
for name, variants in CASES.items():
    for options in variants:
        weights = torch.tensor(INITIAL, requires_grad=True)
        optimizer = getattr(torch.optim, name)([weights], **({"lr": 0.01} if name == "SGD" else {}) | options)
        group = optimizer.param_groups[0]
        # What the file must say for the same numbers, whatever the framework's own defaults are.
        params = options | {"lr": group["lr"]} | ({"weight_decay": group["weight_decay"]} if "weight_decay" in group else {})
        if name == "Adam":
            params["adam_w_mode"] = False
        steps = []
        for gradient in GRADIENTS:
            weights.grad = torch.tensor(gradient)
            optimizer.step()
            steps.append(weights.tolist())
        state = {k: v.tolist() for k, v in optimizer.state[weights].items() if torch.is_tensor(v) and v.numel() == 6}
        cases.append(dict(type=name, params=params, steps=steps, state=state))
document = dict(made_with=dict(torch=torch.__version__), initial=INITIAL, gradients=GRADIENTS, cases=cases)
(folder / "optimizers.json").write_text(json.dumps(document) + "\n")

SCHEDULES = {
    "StepLR": [{"step_size": 3}, {"step_size": 1, "gamma": 0.7}],
    "MultiStepLR": [{"milestones": [2, 5, 5, 9]}, {"milestones": [3], "gamma": 0.5}, {"milestones": [0, 4], "gamma": 0.5}],
    "ConstantLR": [{}, {"factor": 0.25, "total_iters": 8}],
    "LinearLR": [{}, {"start_factor": 0.1, "end_factor": 0.6, "total_iters": 9}],
    "ExponentialLR": [{"gamma": 0.9}],
    "PolynomialLR": [{}, {"total_iters": 10, "power": 2.5}],
    "CosineAnnealingLR": [{"T_max": 7}, {"T_max": 4, "eta_min": 0.01}],
    "CosineAnnealingWarmRestarts": [{"T_0": 5}, {"T_0": 3, "T_mult": 2, "eta_min": 0.02}],
    "CyclicLR": [{"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 4}, {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2, "step_size_down": 5, "mode": "triangular2"},
                 {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "mode": "exp_range", "gamma": 0.95, "base_momentum": 0.7, "max_momentum": 0.85},
                 {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 3, "cycle_momentum": False}],
    "OneCycleLR": [{"max_lr": 0.5, "total_steps": 25}, {"max_lr": 0.5, "epochs": 5, "steps_per_epoch": 6, "anneal_strategy": "linear", "pct_start": 0.4},
                   {"max_lr": 0.5, "total_steps": 30, "three_phase": True, "div_factor": 10, "final_div_factor": 100}, {"max_lr": 0.5, "total_steps": 24, "cycle_momentum": False}],
    "ReduceLROnPlateau": [{"patience": 2}, {"patience": 1, "factor": 0.5, "cooldown": 2, "min_lr": 0.03}, {"mode": "max", "patience": 0, "threshold": 0.05, "threshold_mode": "abs"},
                          {"mode": "max", "patience": 3, "factor": 0.3}, {"threshold": 0.3, "patience": 0, "eps": 0.02}],
}
METRICS = [round(x, 4) for x in (torch.linspace(2, 1, 24) + 0.2 * torch.randn(24)).tolist()]
cases = []
for name, variants in SCHEDULES.items():
    for params in variants:
        for optimizer in ("SGD", "Adam"):
            weights = torch.zeros(1, requires_grad=True)
            made = getattr(torch.optim, optimizer)([weights], lr=0.1, **({"momentum": 0.9} if optimizer == "SGD" else {}))
            schedule = getattr(torch.optim.lr_scheduler, name)(made, **params)
            group, rates = made.param_groups[0], []
            for metric in METRICS:
                rates.append([group["lr"], group["momentum"] if optimizer == "SGD" else group["betas"][0]])
                made.step()
                schedule.step(*([metric] if name == "ReduceLROnPlateau" else []))
            cases.append(dict(type=name, params=params, optimizer=optimizer, rates=rates))
document = dict(made_with=dict(torch=torch.__version__), metrics=METRICS, cases=cases)
(folder / "schedules.json").write_text(json.dumps(document) + "\n")
