//! [`Limited`]: serializes a value to a limited depth. A serializer recurses for each level, so a value that would be
//! too deep for the stack is rejected during serialization.

use std::cell::Cell;

use serde::ser::{self, Error, Serialize, Serializer};

/// The maximum nesting of values, where each `Some` and newtype counts as a level. All but
/// [`MOST`](super::document::MOST) of the levels may be such wrappers. A level takes less than 2 KiB of stack in a
/// debug build.
const MOST: usize = 256;

/// Limits the length for which the serializer allocates memory: a value may claim any length.
fn bounded(len: usize) -> usize {
    len.min(MOST)
}

pub(super) struct Limited<'b, T> {
    value: T,
    left: usize,
    beyond: &'b Cell<bool>,
}

impl<'b, T> Limited<'b, T> {
    /// `beyond` is set if the value is too deep.
    pub(super) fn new(value: T, beyond: &'b Cell<bool>) -> Self {
        Self { value, left: MOST, beyond }
    }
}

impl<T: Serialize> Serialize for Limited<'_, T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.value.serialize(Levels { within: serializer, left: self.left, beyond: self.beyond })
    }
}

/// A serializer (or its state for the parts of a value) and the number of remaining levels.
struct Levels<'b, S> {
    within: S,
    left: usize,
    beyond: &'b Cell<bool>,
}

impl<'b, S> Levels<'b, S> {
    /// Wraps a part of the value, one level deeper.
    fn part<'v, T: ?Sized, E: Error>(&self, value: &'v T) -> Result<Limited<'b, &'v T>, E> {
        let Some(left) = self.left.checked_sub(1) else {
            self.beyond.set(true);
            return Err(E::custom("too many levels"));
        };
        Ok(Limited { value, left, beyond: self.beyond })
    }

    fn with<C, E>(self, begin: impl FnOnce(S) -> Result<C, E>) -> Result<Levels<'b, C>, E> {
        Ok(Levels { within: begin(self.within)?, left: self.left, beyond: self.beyond })
    }
}

macro_rules! leaves {
    ($($method:ident($type:ty)),* $(,)?) => {
        $(fn $method(self, value: $type) -> Result<S::Ok, S::Error> {
            self.within.$method(value)
        })*
    };
}

impl<'b, S: Serializer> Serializer for Levels<'b, S> {
    type Ok = S::Ok;
    type Error = S::Error;
    type SerializeSeq = Levels<'b, S::SerializeSeq>;
    type SerializeTuple = Levels<'b, S::SerializeTuple>;
    type SerializeTupleStruct = Levels<'b, S::SerializeTupleStruct>;
    type SerializeTupleVariant = Levels<'b, S::SerializeTupleVariant>;
    type SerializeMap = Levels<'b, S::SerializeMap>;
    type SerializeStruct = Levels<'b, S::SerializeStruct>;
    type SerializeStructVariant = Levels<'b, S::SerializeStructVariant>;

    leaves! {
        serialize_bool(bool), serialize_char(char), serialize_str(&str), serialize_bytes(&[u8]),
        serialize_i8(i8), serialize_i16(i16), serialize_i32(i32), serialize_i64(i64), serialize_i128(i128),
        serialize_u8(u8), serialize_u16(u16), serialize_u32(u32), serialize_u64(u64), serialize_u128(u128),
        serialize_f32(f32), serialize_f64(f64), serialize_unit_struct(&'static str),
    }

    fn serialize_none(self) -> Result<S::Ok, S::Error> {
        self.within.serialize_none()
    }

    fn serialize_unit(self) -> Result<S::Ok, S::Error> {
        self.within.serialize_unit()
    }

    fn serialize_unit_variant(self, name: &'static str, at: u32, variant: &'static str) -> Result<S::Ok, S::Error> {
        self.within.serialize_unit_variant(name, at, variant)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<S::Ok, S::Error> {
        let value = self.part(value)?;
        self.within.serialize_some(&value)
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(self, name: &'static str, value: &T) -> Result<S::Ok, S::Error> {
        let value = self.part(value)?;
        self.within.serialize_newtype_struct(name, &value)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<S::Ok, S::Error> {
        let value = self.part(value)?;
        self.within.serialize_newtype_variant(name, at, variant, &value)
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Self::SerializeSeq, S::Error> {
        self.with(|within| within.serialize_seq(len.map(bounded)))
    }

    fn serialize_tuple(self, len: usize) -> Result<Self::SerializeTuple, S::Error> {
        self.with(|within| within.serialize_tuple(bounded(len)))
    }

    fn serialize_tuple_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeTupleStruct, S::Error> {
        self.with(|within| within.serialize_tuple_struct(name, bounded(len)))
    }

    fn serialize_tuple_variant(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Self::SerializeTupleVariant, S::Error> {
        self.with(|within| within.serialize_tuple_variant(name, at, variant, bounded(len)))
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Self::SerializeMap, S::Error> {
        self.with(|within| within.serialize_map(len.map(bounded)))
    }

    fn serialize_struct(self, name: &'static str, len: usize) -> Result<Self::SerializeStruct, S::Error> {
        self.with(|within| within.serialize_struct(name, bounded(len)))
    }

    fn serialize_struct_variant(
        self,
        name: &'static str,
        at: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Self::SerializeStructVariant, S::Error> {
        self.with(|within| within.serialize_struct_variant(name, at, variant, bounded(len)))
    }

    fn is_human_readable(&self) -> bool {
        self.within.is_human_readable()
    }
}

macro_rules! compounds {
    ($($compound:ident: $method:ident($($name:ident)?)),* $(,)?) => {
        $(impl<S: ser::$compound> ser::$compound for Levels<'_, S> {
            type Ok = S::Ok;
            type Error = S::Error;

            fn $method<T: Serialize + ?Sized>(
                &mut self,
                $($name: &'static str,)?
                value: &T,
            ) -> Result<(), S::Error> {
                let value = self.part(value)?;
                self.within.$method($($name,)? &value)
            }

            fn end(self) -> Result<S::Ok, S::Error> {
                self.within.end()
            }
        })*
    };
}

compounds! {
    SerializeSeq: serialize_element(),
    SerializeTuple: serialize_element(),
    SerializeTupleStruct: serialize_field(),
    SerializeTupleVariant: serialize_field(),
    SerializeStruct: serialize_field(name),
    SerializeStructVariant: serialize_field(name),
}

impl<S: ser::SerializeMap> ser::SerializeMap for Levels<'_, S> {
    type Ok = S::Ok;
    type Error = S::Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), S::Error> {
        let key = self.part(key)?;
        self.within.serialize_key(&key)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), S::Error> {
        let value = self.part(value)?;
        self.within.serialize_value(&value)
    }

    fn end(self) -> Result<S::Ok, S::Error> {
        self.within.end()
    }
}
