use ferrospeed_optim::eigenvalue::{PowerIteration, relative};
use ferrospeed_tensor::random::RandomKey;
use ferrospeed_testkit::golden::golden;

use super::{flat, number};

#[test]
fn golden_block_eigenvalues() {
    golden().each_case("engine/eigenvalue.json", 5, |case| {
        let what = case["id"].to_string();
        if case["kind"] == "post_process" {
            assert_eq!(relative(&flat(&case["input"])), flat(&case["expect"]), "{what}");
            return;
        }
        let iteration = PowerIteration {
            max_iterations: case["max_iter"].as_u64().expect("a count") as usize,
            tolerance: number(&case["tol"]),
            stability: number(&case["stability"]),
        };
        let blocks = case["hessians"].as_array().expect("a list");
        let found: Vec<f64> = blocks
            .iter()
            .enumerate()
            .map(|(block, hessian)| {
                let rows: Vec<Vec<f64>> = hessian.as_array().expect("rows").iter().map(flat).collect();
                let product = |v: &[f32]| -> Result<Vec<f32>, std::convert::Infallible> {
                    let dot = |row: &Vec<f64>| row.iter().zip(v).map(|(h, &v)| h * f64::from(v)).sum::<f64>();
                    Ok(rows.iter().map(|row| dot(row) as f32).collect())
                };
                let key = RandomKey::new(1, block as u32);
                iteration.largest(rows.len(), &key, product, |_, _| ()).unwrap_or_else(|never| match never {})
            })
            .collect();
        let tolerance = number(&case["compare_rtol"]);
        for (got, want) in relative(&found).into_iter().zip(flat(&case["expect_postprocessed"])) {
            assert!((got - want).abs() <= tolerance * want, "{what}: {got} for {want}");
        }
    });
}
