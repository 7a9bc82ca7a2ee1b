//! `ferrospeed checkpoint`: every command on a checkpoint that a real run wrote, and on those that DeepSpeed did.

use super::support;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use super::support::{ferrospeed, stderr, stdout};
use ferrospeed_checkpoint::pt::PtFile;
use ferrospeed_testkit::golden::golden;
use ferrospeed_testkit::tensors::{self, Recorded};

const RECIPE: &str = r#"
    name = "small"
    steps = 4
    ranks = 2
    [model]
    preset = "llama"
    layers = 1
    width = 64
    heads = 2
    [data]
    text = ["text.txt"]
    sequence = 16
    [save]
    every = 2
    [ds_config]
    train_micro_batch_size_per_gpu = 2
    optimizer = { type = "AdamW", params = { lr = 3e-3 } }
    bf16 = { enabled = true }
    zero_optimization = { stage = 2 }
"#;

/// The folder of a run's checkpoints `global_step2` and `global_step4`, made once.
pub(super) fn trained() -> &'static Path {
    static RUN: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let make = || {
        let folder = tempfile::tempdir().unwrap();
        let text: String = (0..4000u32).map(|n| char::from(b'a' + (n * n % 89 % 26) as u8)).collect();
        std::fs::write(folder.path().join("text.txt"), text).unwrap();
        std::fs::write(folder.path().join("recipe.toml"), RECIPE).unwrap();
        let mut command = support::binary();
        let output = support::output_of(command.args(["train", "recipe.toml"]).current_dir(folder.path()));
        assert!(output.status.success(), "{}", stderr(&output));
        let checkpoints = folder.path().join("runs/small/checkpoints");
        (folder, checkpoints)
    };
    &RUN.get_or_init(make).1
}

pub(super) fn checkpoint(words: &[&str]) -> Output {
    ferrospeed(&[&["checkpoint"], words].concat())
}

pub(super) fn good(words: &[&str]) -> String {
    let output = checkpoint(words);
    assert!(output.status.success(), "{words:?}:\n{}\n{}", stdout(&output), stderr(&output));
    stdout(&output)
}

pub(super) fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// A copy that a test may damage.
pub(super) fn copy_of(folder: &Path) -> tempfile::TempDir {
    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap().map(Result::unwrap) {
            let target = to.join(entry.file_name());
            if entry.path().is_dir() {
                copy(&entry.path(), &target);
            } else {
                std::fs::copy(entry.path(), target).unwrap();
            }
        }
    }
    let place = tempfile::tempdir().unwrap();
    copy(folder, place.path());
    place
}

#[test]
fn inspect_says_what_is_there() {
    let said = good(&["inspect", text(trained()), "--tensors"]);
    for part in
        ["global_step4", "2 ranks, ZeRO stage 2, BF16", "AdamW", "4 (0 skipped)", "state.exp_avg", "pieces"]
    {
        assert!(said.contains(part), "'{part}' is not in:\n{said}");
    }
    let older = good(&["inspect", text(trained()), "--tag", "global_step2", "--json"]);
    let manifest: serde_json::Value = serde_json::from_str(&older).unwrap();
    assert_eq!(manifest["training"]["global_steps"], 2);

    let nothing = checkpoint(&["inspect", text(trained()), "--tag", "global_step3"]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(stderr(&nothing).contains("there are: global_step2, global_step4"), "{}", stderr(&nothing));
}

#[test]
fn verify_finds_a_flipped_bit_and_names_it() {
    assert!(good(&["verify", text(trained())]).contains("whole"));
    let copy = copy_of(trained());
    let file = copy.path().join("global_step4/rank_00001.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&file, &bytes).unwrap();
    let damaged = checkpoint(&["verify", text(copy.path())]);
    assert_eq!(damaged.status.code(), Some(1));
    for part in ["rank_00001.safetensors", "is damaged between bytes", "checksum", "load an older checkpoint"]
    {
        assert!(stderr(&damaged).contains(part), "'{part}' is not in:\n{}", stderr(&damaged));
    }
    std::fs::write(&file, &bytes[..middle]).unwrap();
    let shortened = checkpoint(&["verify", text(copy.path()), "--tag", "global_step4"]);
    assert!(stderr(&shortened).contains("cut short"), "{}", stderr(&shortened));
}

#[test]
fn weights_leave_as_fp32_and_as_a_model_directory() {
    let out = tempfile::tempdir().unwrap();
    let (safetensors, torch) = (out.path().join("w.safetensors"), out.path().join("w.bin"));
    good(&["to-fp32", text(trained()), text(&safetensors)]);
    good(&["to-fp32", text(trained()), text(&torch)]);
    let weights = tensors::read(&safetensors);
    assert!(weights.len() > 5);
    let file = PtFile::open(&torch).unwrap();
    assert_eq!(file.value().pairs().unwrap().len(), weights.len());
    for (name, value) in file.value().pairs().unwrap() {
        let tensor = value.as_tensor().unwrap();
        let values = file.read_f32(tensor, 0..tensor.numel()).unwrap();
        assert_eq!(values, weights[name.as_str().unwrap()].floats(), "{name:?}");
    }

    // In shards too small for all, and in bf16: what the run itself exported.
    let (model, shards) = (out.path().join("model"), out.path().join("shards"));
    good(&["export-hf", text(trained()), text(&model)]);
    good(&["export-hf", text(trained()), text(&shards), "--max-shard-bytes", "50000"]);
    let own = trained().parent().unwrap().join("model");
    assert_eq!(
        std::fs::read(model.join("model.safetensors")).unwrap(),
        std::fs::read(own.join("model.safetensors")).unwrap()
    );
    let index = std::fs::read(shards.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    // The tied head is there under both its names in a state dictionary, and under one in a model directory.
    assert!(weights.contains_key("lm_head.weight"));
    assert_eq!(index["weight_map"].as_object().unwrap().len(), weights.len() - 1);
    // What is there stays as it is.
    let refused = checkpoint(&["export-hf", text(trained()), text(&model), "--max-shard-bytes", "50000"]);
    assert!(stderr(&refused).contains("is already there"), "{}", stderr(&refused));
    assert!(!model.join("model.safetensors.index.json").exists());
    for folder in [&model, &shards] {
        let words = ["generate", "--model", text(folder), "--prompt", "ab", "--tokens", "4"];
        let output = ferrospeed(&words);
        assert!(output.status.success(), "{}", stderr(&output));
        assert!(stdout(&output).starts_with("ab"));
    }
}

#[test]
fn a_checkpoint_goes_to_deepspeed_and_comes_back_the_same() {
    let out = tempfile::tempdir().unwrap();
    for (stage, ranks) in [("1", "2"), ("2", "3"), ("3", "2")] {
        let (theirs, ours) = (out.path().join(format!("ds{stage}")), out.path().join(format!("back{stage}")));
        good(&["export-deepspeed", text(trained()), text(&theirs), "--stage", stage, "--ranks", ranks]);
        let (fp32, again) = (
            out.path().join(format!("a{stage}.safetensors")),
            out.path().join(format!("b{stage}.safetensors")),
        );
        good(&["to-fp32", text(trained()), text(&fp32)]);
        good(&["to-fp32", text(&theirs), text(&again)]);
        assert_eq!(tensors_of(&fp32), tensors_of(&again), "stage {stage}");
        good(&["import-deepspeed", text(&theirs), text(&ours)]);
        same(&trained().join("global_step4"), &ours.join("global_step4"));
        let refused = stderr(&checkpoint(&["import-deepspeed", text(&theirs), text(&ours)]));
        assert!(refused.contains("would be replaced"), "{refused}");
        for folder in [&theirs, &theirs.join("global_step4")] {
            for command in ["verify", "inspect"] {
                let refused = stderr(&checkpoint(&[command, text(folder)]));
                assert!(
                    refused
                        .contains("global_step4 is DeepSpeed's checkpoint, and only ours have the checksums")
                        && refused.contains("checkpoint to-fp32")
                        && refused.contains("checkpoint import-deepspeed"),
                    "{command}: {refused}"
                );
            }
        }
    }
    let (universal, ours) = (out.path().join("uni"), out.path().join("back"));
    good(&["to-universal", text(trained()), text(&universal)]);
    good(&["import-deepspeed", text(&universal), text(&ours), "--tag", "global_step4_universal"]);
    same(&trained().join("global_step4"), &ours.join("global_step4_universal"));
    for folder in [&universal, &universal.join("global_step4_universal")] {
        let refused = checkpoint(&["to-fp32", text(folder), text(&out.path().join("none.pt"))]);
        let told = stderr(&refused);
        assert!(told.contains("is a universal checkpoint") && told.contains("import-deepspeed"), "{told}");
    }
}

#[test]
fn an_export_that_is_refused_leaves_no_folder_behind() {
    let out = tempfile::tempdir().unwrap();
    let theirs = out.path().join("ds");
    let refused =
        checkpoint(&["export-deepspeed", text(trained()), text(&theirs), "--ranks", "4", "--ep", "3"]);
    assert_eq!(refused.status.code(), Some(2), "{}", stdout(&refused));
    assert!(!theirs.exists(), "{}", stderr(&refused));
    // A run of 16-bit weights that is no list of layers.
    for more in [&["--pipeline", "0,3"][..], &["--pipeline", "3,0"], &["--stage", "0"]] {
        let refused = checkpoint(&[&["export-deepspeed", text(trained()), text(&theirs)], more].concat());
        assert_eq!(refused.status.code(), Some(2), "{more:?}: {}", stderr(&refused));
        assert!(!theirs.exists(), "{}", stderr(&refused));
    }
}

#[test]
fn a_checkpoint_is_found_by_its_own_folder_and_by_the_one_that_holds_it() {
    let own = trained().join("global_step4");
    assert!(good(&["verify", text(&own)]).contains("global_step4: whole"));
    assert!(good(&["inspect", text(&own)]).contains("global_step4"));
    assert_eq!(good(&["diff", text(&own), text(trained())]).trim(), "the same");
}

#[test]
fn a_runs_folder_is_taken_for_its_checkpoints_and_the_one_that_was_taken_is_told() {
    let (run, out) = (trained().parent().unwrap(), tempfile::tempdir().unwrap());
    let at = |name: &str| out.path().join(name).display().to_string();
    assert!(good(&["verify", text(run)]).contains("checkpoints/global_step4: whole"));
    assert!(good(&["inspect", text(run), "--tag", "global_step2"]).contains("checkpoints/global_step2"));
    assert_eq!(good(&["diff", text(run), text(trained())]).trim(), "the same");
    for words in [
        ["to-fp32", text(run), &at("w.safetensors")],
        ["export-hf", text(run), &at("model")],
        ["export-deepspeed", text(run), &at("theirs")],
        ["to-universal", text(run), &at("universal")],
    ] {
        let output = checkpoint(&words);
        assert!(output.status.success(), "{words:?}: {}", stderr(&output));
        assert!(
            stderr(&output).contains("checkpoints/global_step4 is taken"),
            "{words:?}: {}",
            stderr(&output)
        );
    }
    // What is called like a run's folder of checkpoints and is one checkpoint, is one.
    let named = tempfile::tempdir().unwrap();
    std::fs::rename(copy_of(&trained().join("global_step2")).keep(), named.path().join("checkpoints"))
        .unwrap();
    assert!(good(&["verify", text(named.path()), "--tag", "checkpoints"]).contains("checkpoints: whole"));
}

#[test]
fn a_checkpoint_that_was_put_away_is_told_wherever_one_looks() {
    let copy = copy_of(trained());
    let (own, away) = (copy.path().join("global_step4"), copy.path().join(".global_step4.replaced-12-0"));
    let look = |command: &str| {
        let output = checkpoint(&[command, text(copy.path())]);
        assert!(output.status.success(), "{}", stderr(&output));
        (stdout(&output), stderr(&output))
    };
    std::fs::rename(copy_of(&own).keep(), &away).unwrap();
    for command in ["verify", "inspect"] {
        let (said, told) = look(command);
        assert!(said.contains("/global_step4"), "{said}");
        assert!(told.contains(".global_step4.replaced-12-0 is an earlier 'global_step4'"), "{told}");
        assert!(told.contains("the new 'global_step4' is whole and used") && told.contains("mv "), "{told}");
    }
    std::fs::remove_dir_all(&own).unwrap();
    let (said, told) = look("verify");
    assert!(said.contains(".global_step4.replaced-12-0: whole"), "{said}");
    assert!(told.contains("it is used as 'global_step4'"), "{told}");

    // A run that `train --overwrite` had put away when it was killed.
    let run = tempfile::tempdir().unwrap();
    std::fs::create_dir_all(run.path().join(".replaced")).unwrap();
    std::fs::rename(copy.keep(), run.path().join(".replaced/checkpoints")).unwrap();
    let gone = checkpoint(&["verify", text(run.path())]);
    assert_eq!(gone.status.code(), Some(2), "{}", stderr(&gone));
    assert!(stderr(&gone).contains("gives it back"), "{}", stderr(&gone));
    assert!(good(&["verify", text(&run.path().join(".replaced"))]).contains("whole"));
}

#[test]
fn a_file_of_weights_is_replaced_only_where_that_is_said() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("weights.safetensors");
    std::fs::write(&file, "mine").unwrap();
    let refused = checkpoint(&["to-fp32", text(trained()), text(&file)]);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("--overwrite"), "{}", stderr(&refused));
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    good(&["to-fp32", text(trained()), text(&file), "--overwrite"]);
    assert!(tensors::read(&file).len() > 5);
}

#[test]
fn weights_that_are_being_written_follow_no_link_and_leave_nothing_of_the_killed() {
    let out = tempfile::tempdir().unwrap();
    let at = |name: &str| out.path().join(name);
    std::fs::write(at("mine"), "mine").unwrap();
    let links = ["w.safetensors.partial", "w.bin.partial"];
    links.iter().for_each(|link| std::os::unix::fs::symlink(at("mine"), at(link)).unwrap());
    // No process has this number.
    std::fs::write(at(".w.bin.partial-4194999-1f"), "left").unwrap();
    std::fs::create_dir_all(at(".model.4194999.partial/deep")).unwrap();
    good(&["to-fp32", text(trained()), text(&at("w.safetensors"))]);
    good(&["to-fp32", text(trained()), text(&at("w.bin"))]);
    good(&["export-hf", text(trained()), text(&at("model"))]);
    assert_eq!(std::fs::read(at("mine")).unwrap(), b"mine");
    assert!(tensors::read(&at("w.safetensors")).len() > 5);
    let hidden = std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(hidden.filter(|name| name.as_encoded_bytes()[0] == b'.').count(), 0);
}

#[test]
fn what_is_no_checkpoint_or_no_name_for_one_is_bad_input() {
    let out = tempfile::tempdir().unwrap();
    let at = |name: &str| out.path().join(name).display().to_string();
    std::fs::create_dir_all(at("other/step")).unwrap();
    std::fs::write(at("file"), "").unwrap();
    let (trained, gone, file, other, new) = (text(trained()), at("gone"), at("file"), at("other"), at("new"));
    let foo = at("w.foo");
    for (words, why) in [
        (&["verify", &gone][..], "is not there"),
        (&["inspect", &file], "is no folder"),
        (&["to-fp32", &gone, &at("w.pt")], "is not there"),
        (&["import-deepspeed", &gone, &new, "--tag", "step"], "is not there"),
        (&["import-deepspeed", &other, &new, "--tag", "step"], "it is no DeepSpeed checkpoint"),
        (&["to-fp32", trained, &foo], "Call it .safetensors, or .bin, .pt or .pth"),
        (&["to-fp32", trained, &at("w")], "Call it .safetensors, or .bin, .pt or .pth"),
        (&["to-fp32", trained, &at("gone/w.pt")], "there is no folder"),
        (&["to-fp32", trained, &other, "--overwrite"], "is a folder; name a file"),
        (&["export-hf", trained, &new, "--max-shard-bytes", "0"], "--max-shard-bytes"),
        (
            &["export-deepspeed", trained, &new, "--pipeline", "0,3", "--tied", "0,a"],
            "'a' is no layer's number; write them as 0,5",
        ),
        (&["export-deepspeed", trained, &new, "--pipeline", "0,b"], "'b' is no layer's number"),
    ] {
        let refused = checkpoint(words);
        assert_eq!(refused.status.code(), Some(2), "{words:?}: {}", stderr(&refused));
        assert!(stderr(&refused).contains(why), "{words:?}: {}", stderr(&refused));
    }
    let mut left: Vec<_> =
        std::fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["file", "other"]);
}

#[test]
fn a_disk_that_is_full_keeps_no_part_of_a_file() {
    if !support::may_mount() {
        return;
    }
    let out = tempfile::tempdir().unwrap();
    let place = out.path().display();
    for (command, name) in [
        ("to-fp32", "w.pt"),
        ("to-fp32", "w.safetensors"),
        ("export-hf", "model"),
        ("export-hf", "deep/er/model"),
        ("export-deepspeed", "deep/er/theirs"),
        ("to-universal", "deep/er/universal"),
    ] {
        let script = format!(
            "mount -t tmpfs -o size=64k tmpfs {place} && {} checkpoint {command} {} {place}/{name}; echo \"code $?\"; ls -A {place}",
            env!("CARGO_BIN_EXE_ferrospeed"),
            text(trained())
        );
        let output =
            support::output_of(std::process::Command::new("unshare").args(["-rm", "sh", "-c", &script]));
        assert_eq!(stdout(&output).trim(), "code 1", "{name}: {}", stderr(&output));
        assert!(stderr(&output).contains("No space left"), "{}", stderr(&output));
    }
}

#[test]
fn a_model_directory_has_the_type_that_was_trained_in_unless_another_is_asked_for() {
    let out = tempfile::tempdir().unwrap();
    for (more, kind) in [(&[][..], "BF16"), (&["--dtype", "f32"], "F32"), (&["--dtype", "f16"], "F16")] {
        let model = out.path().join(kind);
        let said = good(&[&["export-hf", text(trained()), text(&model)], more].concat());
        assert!(said.contains(&format!("weights in {kind}")), "{said}");
        let bytes = std::fs::read(model.join("model.safetensors")).unwrap();
        assert!(String::from_utf8_lossy(&bytes[..2000]).contains(&format!("\"dtype\":\"{kind}\"")), "{kind}");
    }
    // A checkpoint of f32 weights stays in f32.
    let (theirs, ours) = (out.path().join("theirs"), out.path().join("ours"));
    good(&["export-deepspeed", text(trained()), text(&theirs)]);
    let said = good(&["export-hf", text(&theirs), text(&ours)]);
    assert!(said.contains("weights in F32") && said.contains("--dtype"), "{said}");
}

fn tensors_of(path: &Path) -> Vec<(String, Vec<f32>)> {
    let of = |(name, tensor): (&String, &Recorded)| (name.clone(), tensor.floats().to_vec());
    tensors::read(path).iter().map(of).collect()
}

/// Every tensor is the same; what DeepSpeed's files have no room for may differ.
fn same(first: &Path, second: &Path) {
    let output = checkpoint(&["diff", text(first), text(second)]);
    let said = stdout(&output);
    let is_tensor =
        |line: &str| line.contains("elements differ") || line.starts_with("only in") || line.contains("): ");
    assert!(!said.is_empty() && !said.lines().any(is_tensor), "{said}\n{}", stderr(&output));
}

#[test]
fn diff_counts_what_differs() {
    let [two, four] = ["global_step2", "global_step4"].map(|tag| trained().join(tag));
    assert_eq!(good(&["diff", text(&two), text(&two)]).trim(), "the same");
    let output = checkpoint(&["diff", text(&two), text(&four)]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stdout(&output).contains("elements differ") && stdout(&output).contains("(state.exp_avg)"));
    assert!(stdout(&output).lines().any(|line| line == "global_steps: 2 and 4"), "{}", stdout(&output));
}

#[test]
fn diff_tells_trouble_from_a_difference() {
    let folder = tempfile::tempdir().unwrap();
    let two = trained().join("global_step2");
    for file in std::fs::read_dir(&two).unwrap().map(|entry| entry.unwrap().path()) {
        std::fs::copy(&file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let damaged = text(folder.path());
    assert_eq!(checkpoint(&["diff", text(&two), damaged]).status.code(), Some(0));
    let shards = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let largest = shards.max_by_key(|path| path.metadata().unwrap().len()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&largest).unwrap();
    file.set_len(largest.metadata().unwrap().len() / 2).unwrap();
    for other in [damaged, "no/such/checkpoint"] {
        let output = checkpoint(&["diff", text(&two), other]);
        assert_eq!(output.status.code(), Some(2), "{other}: {}", stderr(&output));
        assert!(!stderr(&output).is_empty() && stdout(&output).is_empty());
    }
}

#[test]
fn golden_checkpoints_of_deepspeed_go_through_every_command() {
    let runs = golden().entries("checkpoint/runs", "").into_iter().filter(|case| case.join("ckpt").is_dir());
    golden().each_path("checkpoint/runs", runs, 17, |case| {
        let out = tempfile::tempdir().unwrap();
        let dir = case.join("ckpt");
        let ours = out.path().join("ours");
        good(&["import-deepspeed", text(&dir), text(&ours)]);
        good(&["verify", text(&ours)]);
        let extracted = out.path().join("w.safetensors");
        let recorded = case.join("zero_to_fp32.safetensors");
        if recorded.is_file() {
            good(&["to-fp32", text(&dir), text(&extracted)]);
            assert_eq!(tensors_of(&extracted), tensors_of(&recorded), "{}", case.display());
            good(&["to-fp32", text(&ours), text(&extracted), "--overwrite"]);
            assert_eq!(tensors_of(&extracted), tensors_of(&recorded), "{}: imported", case.display());
            // A tied weight is in a model directory once.
            good(&["export-hf", text(&ours), text(&out.path().join("hf")), "--dtype", "f32"]);
            let exported = tensors_of(&out.path().join("hf/model.safetensors"));
            let manifest = std::fs::read_dir(&ours).unwrap().map(|entry| entry.unwrap().path());
            let manifest =
                manifest.map(|path| path.join("manifest.json")).find(|path| path.is_file()).unwrap();
            let manifest: serde_json::Value =
                serde_json::from_slice(&std::fs::read(manifest).unwrap()).unwrap();
            let aliases = manifest["aliases"].as_object().map_or(0, |aliases| aliases.len());
            assert_eq!(exported.len() + aliases, tensors_of(&recorded).len(), "{}", case.display());
        }
    });
}
