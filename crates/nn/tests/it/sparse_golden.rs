//! Block-sparse layouts and attention over them against DeepSpeed's layout builders and its recorded formula.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;

use ferrospeed_nn::sparse_attention::{SparseAttention, bias_of_kept};
use ferrospeed_tensor::ops::{self, AttentionOptions};
use ferrospeed_tensor::{BlockLayout, DType, Tensor, autograd};
use ferrospeed_testkit::close::assert_close;
use ferrospeed_testkit::golden::golden;
use ferrospeed_testkit::tensors;
use serde_json::{Value, json};

/// Where ours differs, and why.
const FEW_TO_DRAW_FROM: &str =
    "BigBird, unidirectional: the first rows draw from fewer blocks than are asked for, and take all";

/// The mode of a class, and what its constructor says where a section says something else.
fn section(class: &str, kwargs: &Value) -> Value {
    let (mode, defaults) = match class {
        "DenseSparsityConfig" => ("dense", json!({})),
        "FixedSparsityConfig" => ("fixed", json!({})),
        "VariableSparsityConfig" => ("variable", json!({})),
        "BigBirdSparsityConfig" => ("bigbird", json!({ "num_random_blocks": 1 })),
        "BSLongformerSparsityConfig" => ("bslongformer", json!({})),
        "LocalSlidingWindowSparsityConfig" => ("localslidingwindow", json!({})),
        other => panic!("an unknown class: {other}"),
    };
    let mut section = defaults;
    for (key, value) in kwargs.as_object().expect("arguments") {
        // Heads are told with the layout. Classes without random blocks or global ones take a flag that changes nothing.
        let says_nothing =
            ["dense", "localslidingwindow"].contains(&mode) && key == "different_layout_per_head";
        if key != "num_heads" && !says_nothing {
            section[key] = value.clone();
        }
    }
    section["mode"] = mode.into();
    section
}

/// Rows of '0' and '1' of each head.
fn recorded(case: &Value) -> Vec<Vec<Vec<bool>>> {
    let rows = |rows: &Value| -> Vec<Vec<bool>> {
        let row = |row: &Value| row.as_str().expect("a row").chars().map(|c| c == '1').collect();
        rows.as_array().expect("rows").iter().map(row).collect()
    };
    let heads = case["kwargs"]["num_heads"].as_u64().expect("heads") as usize;
    match case["layout_per_head"].as_array() {
        Some(heads) => heads.iter().map(rows).collect(),
        None => vec![rows(&case["layout_all_heads"]); heads],
    }
}

fn rows_of(layout: &BlockLayout, heads: usize) -> Vec<Vec<Vec<bool>>> {
    let row = |head, row| (0..layout.blocks()).map(|column| layout.is_active(head, row, column)).collect();
    (0..heads).map(|head| (0..layout.blocks()).map(|at| row(head, at)).collect()).collect()
}

/// Everything of `least` is there, and of other columns no more than `random` in a row.
fn assert_adds_at_most(what: &str, whole: &[Vec<Vec<bool>>], least: &[Vec<Vec<bool>>], random: usize) {
    for (head, (whole, least)) in whole.iter().zip(least).enumerate() {
        for (row, (whole, least)) in whole.iter().zip(least).enumerate() {
            let lacks = least.iter().zip(whole).any(|(least, whole)| *least && !whole);
            let added = least.iter().zip(whole).filter(|(least, whole)| !**least && **whole).count();
            assert!(!lacks && added <= random, "{what}, head {head}, row {row}: {whole:?} of {least:?}");
        }
    }
}

#[test]
fn golden_sparse_layouts() {
    let mut met = BTreeSet::new();
    golden().each_case("sparse/layouts.json", 44, |case| {
        let kwargs = &case["kwargs"];
        let what = format!("{} {kwargs}", case["class"]);
        let heads = kwargs["num_heads"].as_u64().expect("heads") as usize;
        let tokens = case["seq_len"].as_u64().expect("a length") as usize;
        let section = section(case["class"].as_str().expect("a class"), kwargs);
        let layout_of = |section: &Value| {
            SparseAttention::from_section(section).and_then(|kind| kind.with_seed(3).layout(0..heads, tokens))
        };
        let layout = layout_of(&section);
        let random = section["num_random_blocks"].as_u64().unwrap_or(0) as usize;
        if let Some(error) = case["error"].as_str() {
            if error.contains("Sample larger than population") {
                met.insert(FEW_TO_DRAW_FROM);
                let rows = rows_of(&layout.unwrap_or_else(|error| panic!("{what}: {error}")), heads);
                let sees_later = |(row, columns): (usize, &Vec<bool>)| columns[row + 1..].contains(&true);
                assert!(!rows.iter().any(|rows| rows.iter().enumerate().any(sees_later)), "{what}");
                return;
            }
            let said = layout.map(drop).expect_err(&what).to_string();
            assert!(said.starts_with("sparse_attention: "), "{what}: {said}");
            return;
        }
        let layout = layout.unwrap_or_else(|error| panic!("{what}: {error}"));
        let (ours, theirs) = (rows_of(&layout, heads), recorded(case));
        if random == 0 {
            assert_eq!(ours, theirs, "{what}");
            let active: usize = (0..heads).map(|head| layout.active(head)).sum();
            assert_eq!(Some(active as u64), case["nnz"].as_u64(), "{what}");
            return;
        }
        let mut without = section.clone();
        without["num_random_blocks"] = 0.into();
        let least = layout_of(&without).unwrap_or_else(|error| panic!("{what}: {error}"));
        let least = rows_of(&least, heads);
        assert_adds_at_most(&format!("{what}, recorded"), &theirs, &least, random);
        assert_adds_at_most(&format!("{what}, ours"), &ours, &least, random);
        assert_ne!(ours, least, "{what}: nothing is drawn");
    });
    println!("golden_sparse_layouts: ours differs where: {met:?}");
}

/// `[batch, heads, tokens, dim]` as `[batch, tokens, heads, dim]`, or back.
fn turned(x: &Tensor) -> Tensor {
    ops::permute(x, &[0, 2, 1, 3]).expect("four dimensions")
}

#[test]
fn golden_sparse_attention_and_gradients() {
    let set = golden();
    set.each_path("sparse", set.path("sparse/sparse_attention.safetensors"), 1, |path| {
        let recorded = tensors::read(path);
        let device = ferrospeed_cpu::device();
        let tensor = |name: &str| {
            let recorded = &recorded[name];
            Tensor::from_f32(recorded.floats(), recorded.shape.as_slice(), DType::F32, &device)
                .expect("a recorded tensor")
        };
        let [q, k, v] = ["q", "k", "v"].map(|name| turned(&tensor(name)).detach().tracked());
        let (cells, shape) = (recorded["layout"].integers(), &recorded["layout"].shape);
        let (heads, blocks) = (shape[0], shape[1]);
        let block = NonZeroUsize::new(q.sizes()[1] / blocks).expect("a sequence of blocks");
        let layout = BlockLayout::new(block, blocks, heads, |head, row, columns| {
            let cells = &cells[(head * blocks + row) * blocks..][..blocks];
            columns.iter_mut().zip(cells).for_each(|(column, cell)| *column = *cell != 0);
        });
        let close = |what: &str, got: &Tensor, name: &str| {
            let got = turned(got).to_vec_f32().expect("values");
            assert_close(what, &got, recorded[name].floats(), 1e-5, 1e-5);
        };
        let options = AttentionOptions { blocks: Some(layout), ..Default::default() };
        let masked = AttentionOptions {
            key_bias: Some(tensor("key_padding_mask_add")),
            score_bias: Some(bias_of_kept(&tensor("attn_mask_mul")).expect("a mask")),
            ..options.clone()
        };
        let out = ops::attention(&q, &k, &v, &masked).expect("a forward pass");
        // A row that sees nothing is not a number there, and zeros here.
        let wanted: Vec<f32> =
            recorded["out_masked"].floats().iter().map(|x| if x.is_nan() { 0.0 } else { *x }).collect();
        assert_close("out_masked", &turned(&out).to_vec_f32().expect("values"), &wanted, 1e-5, 1e-5);
        let out = ops::attention(&q, &k, &v, &options).expect("a forward pass");
        close("out_plain", &out, "out_plain");
        autograd::backward_with(&[(out, turned(&tensor("grad_out")))]).expect("a backward pass");
        for (x, name) in [(&q, "dq"), (&k, "dk"), (&v, "dv")] {
            close(name, &x.grad().expect("a gradient"), name);
        }
    });
}
