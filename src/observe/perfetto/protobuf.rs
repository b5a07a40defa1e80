//! Protobuf's wire format: each function appends one field to `out`.

const VARINT: u64 = 0;
const FIXED64: u64 = 1;
const LENGTH_DELIMITED: u64 = 2;

fn raw_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn key(out: &mut Vec<u8>, field: u32, wire_type: u64) {
    raw_varint(out, u64::from(field) << 3 | wire_type);
}

pub(super) fn varint(out: &mut Vec<u8>, field: u32, value: u64) {
    key(out, field, VARINT);
    raw_varint(out, value);
}

pub(super) fn fixed64(out: &mut Vec<u8>, field: u32, value: u64) {
    key(out, field, FIXED64);
    out.extend_from_slice(&value.to_le_bytes());
}

pub(super) fn double(out: &mut Vec<u8>, field: u32, value: f64) {
    fixed64(out, field, value.to_bits());
}

pub(super) fn string(out: &mut Vec<u8>, field: u32, value: &str) {
    key(out, field, LENGTH_DELIMITED);
    raw_varint(out, value.len() as u64);
    out.extend_from_slice(value.as_bytes());
}

/// Appends a message, whose fields `body` appends.
pub(super) fn nested(out: &mut Vec<u8>, field: u32, body: impl FnOnce(&mut Vec<u8>)) {
    key(out, field, LENGTH_DELIMITED);
    // The length precedes the body: most bodies are shorter than 128 bytes, longer ones are moved.
    let length_at = out.len();
    out.push(0);
    body(out);
    let length = out.len() - length_at - 1;
    if length < 0x80 {
        out[length_at] = length as u8;
    } else {
        let mut encoded = Vec::with_capacity(10);
        raw_varint(&mut encoded, length as u64);
        out.splice(length_at..=length_at, encoded);
    }
}
