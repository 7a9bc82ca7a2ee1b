//! Sizes as people write them.

/// Reads `500`, `500MB`, `2GB` (powers of ten, as Hugging Face means them) and `2GiB`.
pub fn parse_size(text: &str) -> Result<usize, String> {
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let factor = match unit.to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KIB" => 1 << 10,
        "MIB" => 1 << 20,
        "GIB" => 1 << 30,
        _ => return Err(format!("'{unit}' is no unit; use KB, MB, GB, KiB, MiB or GiB")),
    };
    let number: usize =
        number.parse().map_err(|_| "give a whole number and a unit, such as 2GB".to_owned())?;
    number.checked_mul(factor).filter(|&bytes| bytes > 0).ok_or_else(|| "is no size of a file".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_and_without_units() {
        assert_eq!(parse_size("500"), Ok(500));
        assert_eq!(parse_size("2GB"), Ok(2_000_000_000));
        assert_eq!(parse_size("3mib"), Ok(3 << 20));
        for bad in ["", "0", "GB", "1.5GB", "-1", "2XB", "99999999999999999999", "99999999999999GB"] {
            assert!(parse_size(bad).is_err(), "{bad}");
        }
    }
}
