//! Hostile wakers where memory, a condition or a blank envelope is waited for: they panic as they are woken or dropped, call
//! back into wakeline, drop buffers. The other waiters resolve all the same, and no panic comes out of a destructor.

#[forbid(unsafe_code)]
mod waits;
