//! A run that goes on with something else than it began with says so, one line for each thing.

use super::support;
use super::support::small_run::Workplace;
use super::support::{binary, output_of, stderr, stdout};

/// What a run that goes on says.
fn resumed(place: &Workplace, more: &[&str]) -> String {
    let output = place.train_well(&[&["--resume"], more].concat());
    stdout(&output) + &stderr(&output)
}

#[test]
fn other_tokens_of_the_same_number_are_told() {
    let place = Workplace::new();
    let data = place.0.path().join("tokens.bin");
    let tokens = |first: u16| -> Vec<u8> {
        (0..4000u16).flat_map(|n| (n.wrapping_mul(n).wrapping_add(first) % 89).to_le_bytes()).collect()
    };
    let source =
        ["--set", "data={\"tokens\": [\"tokens.bin\"], \"sequence\": 16}", "--set", "model.vocabulary=128"];
    std::fs::write(&data, tokens(0)).unwrap();
    place.train_well(&source);
    let told = "data: the tokens are not those that were trained on before, though as many";
    let said = resumed(&place, &source);
    assert!(!said.contains("data:"), "nothing has changed: {said}");
    // The time of a file says nothing, and neither does its place.
    std::fs::rename(&data, place.0.path().join("moved.bin")).unwrap();
    let moved =
        ["--set", "data={\"tokens\": [\"moved.bin\"], \"sequence\": 16}", "--set", "model.vocabulary=128"];
    let said = resumed(&place, &moved);
    assert!(!said.contains(told), "the tokens are the same: {said}");
    let mut other = tokens(0);
    other[4002] ^= 1;
    std::fs::write(&data, other).unwrap();
    let said = resumed(&place, &source);
    assert!(said.contains(told), "{said}");
}

#[test]
fn options_that_are_others_are_told() {
    let place = Workplace::new();
    place.train_well(&["--set", "gradient_clipping=1.0"]);
    let same = resumed(&place, &["--set", "gradient_clipping=1", "--set", "steps_per_print=7"]);
    assert!(!same.contains("->"), "nothing that is learnt has changed: {same}");
    let set = ["gradient_clipping=0.5", "data.documents=apart", "optimizer.params.eps=1e-6"];
    let words: Vec<&str> = set.iter().flat_map(|one| ["--set", one]).collect();
    let said = resumed(&place, &words);
    for line in
        ["gradient_clipping: 1.0 -> 0.5", "data.documents: together -> apart", "optimizer.params.eps: "]
    {
        assert!(said.contains(line), "{line}: {said}");
    }
}

#[test]
fn other_kernels_are_told_for_their_bits_are_others() {
    let place = Workplace::new();
    let train = |kernels: &str, more: &[&str]| {
        let output = output_of(place.command(more).env("FERROSPEED_CPU_KERNELS", kernels));
        assert!(output.status.success(), "{kernels} {more:?}: {}", stderr(&output));
        stdout(&output) + &stderr(&output)
    };
    train("portable", &["-n", "2"]);
    let said = train("portable", &["-n", "2", "--resume", "--set", "steps=7"]);
    assert!(!said.contains("kernels"), "{said}");
    let mut inspect = binary();
    inspect.args(["checkpoint", "inspect"]).arg(place.run_folder("small"));
    let shown = stdout(&output_of(&mut inspect));
    assert!(shown.contains("kernels          portable"), "{shown}");
    if !has_other_kernels() {
        return ferrospeed_testkit::skip::skip("this processor has no kernels but the portable ones");
    }
    let said = train("avx2", &["-n", "2", "--resume", "--set", "steps=8"]);
    let told = "kernels: portable -> avx2: sums are grouped otherwise, so the run goes on to other bits";
    assert_eq!(said.matches(told).count(), 1, "{said}");
}

fn has_other_kernels() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

#[test]
fn other_data_to_validate_on_is_told() {
    let place = Workplace::new();
    let text = |name: &str| std::fs::write(place.0.path().join(name), "words to validate on, ".repeat(40));
    text("own.txt").unwrap();
    place.train_well(&["--set", "data.validation=0.0"]);
    let own = ["--set", "data.validation=[\"own.txt\"]", "--set", "save.every=0"];
    let said = resumed(&place, &[&own[..], &["--set", "steps=8"]].concat());
    assert!(said.contains("data.validation: a share of the data -> files of its own"), "{said}");
    let said = resumed(&place, &["--set", "data.validation=0.0", "--set", "steps=9"]);
    assert!(said.contains("data.validation: files of its own -> a share of the data"), "{said}");
    // Of a share, what is left to train on tells.
    let said = resumed(&place, &["--set", "data.validation=0.5", "--set", "steps=10"]);
    assert!(said.contains("sequences to train on: "), "{said}");
}

#[test]
fn another_optimizer_begins_anew_where_it_is_asked_for() {
    let place = Workplace::new();
    for ranks in ["1", "2"] {
        place.train_well(&["-n", ranks, "--overwrite"]);
        let other = ["-n", ranks, "--resume", "--set", "optimizer.type=Lion", "--set", "steps=8"];
        let refused = place.train(&other);
        let said = stderr(&refused);
        assert_ne!(refused.status.code(), Some(0), "{said}");
        assert!(said.contains("states of adam, this run uses lion"), "{said}");
        assert!(said.contains("train --resume --fresh_optimizer"), "{said}");
        let output = place.train_well(&[&other[..], &["--fresh_optimizer"]].concat());
        let said = stdout(&output) + &stderr(&output);
        assert!(said.contains("the optimizer's states begin anew"), "{said}");
        assert_eq!(support::small_run::losses(&place.run_folder("small")).len(), 8);
    }
    let alone = place.train(&["--fresh_optimizer"]);
    assert_eq!(alone.status.code(), Some(2), "{}", stderr(&alone));
    assert!(stderr(&alone).contains("--resume"), "{}", stderr(&alone));
}

#[test]
fn ratios_that_a_checkpoint_has_not_are_asked_for_and_not_taken_for_zero() {
    let place = Workplace::new();
    let lamb = "optimizer={\"type\": \"OneBitLamb\", \"params\": {\"lr\": 1e-3, \"freeze_step\": 3}}";
    let lamb = ["-n", "1", "--set", lamb];
    place.train_well(&lamb);
    let mut export = binary();
    export.args(["checkpoint", "export-deepspeed", "runs/small", "ds", "--stage", "2", "--ranks", "1"]);
    let exported = output_of(export.current_dir(place.0.path()));
    assert!(exported.status.success(), "{}", stderr(&exported));
    assert!(stderr(&exported).contains("1-bit LAMB's ratios, have no place"), "{}", stderr(&exported));
    let on = [&lamb[..], &["--resume", "ds", "--out", "runs/on", "--set", "steps=8"]].concat();
    let refused = place.train(&on);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("holds no ratios of 1-bit LAMB for"), "{}", stderr(&refused));
    place.train_well(&[&on[..], &["--fresh_optimizer"]].concat());
    // One of our own holds them.
    place.train_well(&[&lamb[..], &["--resume", "--set", "steps=8"]].concat());
}
