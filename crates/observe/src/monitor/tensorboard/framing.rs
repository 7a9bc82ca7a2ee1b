//! TFRecord framing: `u64` length, masked CRC of the length, payload, masked CRC of the payload, little-endian.

/// CRC-32C (Castagnoli), reflected, one entry per byte.
const TABLE: [u32; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = byte as u32;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};

fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}

/// A CRC that may itself be part of checksummed data: rotated and offset, so that it is not its own fixed point.
fn masked_crc32c(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A payload in its frame.
pub(super) fn frame(payload: &[u8]) -> Vec<u8> {
    let length = (payload.len() as u64).to_le_bytes();
    let mut framed = Vec::with_capacity(payload.len() + 16);
    framed.extend_from_slice(&length);
    framed.extend_from_slice(&masked_crc32c(&length).to_le_bytes());
    framed.extend_from_slice(payload);
    framed.extend_from_slice(&masked_crc32c(payload).to_le_bytes());
    framed
}

/// Splits the first payload off, checking both CRCs, or says what is wrong with it.
pub(super) fn unframe(bytes: &[u8]) -> Result<(&[u8], &[u8]), &'static str> {
    let (length_bytes, rest) = bytes.split_first_chunk::<8>().ok_or("cut off in its length")?;
    let (crc, rest) = rest.split_first_chunk::<4>().ok_or("cut off in the checksum of its length")?;
    if u32::from_le_bytes(*crc) != masked_crc32c(length_bytes) {
        return Err("the checksum of its length does not match");
    }
    let length = usize::try_from(u64::from_le_bytes(*length_bytes)).map_err(|_| "longer than memory")?;
    let (payload, rest) = rest.split_at_checked(length).ok_or("cut off in its payload")?;
    let (crc, rest) = rest.split_first_chunk::<4>().ok_or("cut off in the checksum of its payload")?;
    if u32::from_le_bytes(*crc) != masked_crc32c(payload) {
        return Err("the checksum of its payload does not match");
    }
    Ok((payload, rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc_matches_the_published_vectors() {
        // The check value of the CRC catalogue, and RFC 3720, section B.4.
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(b""), 0);
    }

    #[test]
    fn every_flipped_bit_and_every_cut_is_noticed() {
        let framed = frame(b"payload");
        assert_eq!(unframe(&framed), Ok((&b"payload"[..], &b""[..])));
        for bit in 0..framed.len() * 8 {
            let mut damaged = framed.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(unframe(&damaged).is_err(), "bit {bit}");
        }
        for length in 0..framed.len() {
            assert!(unframe(&framed[..length]).is_err(), "{length} bytes");
        }
    }
}
